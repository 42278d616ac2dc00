#!/usr/bin/env python3
"""Check that the peers of a run are reachable from here: join its DHT briefly and print the number of active trainers.

    python -m deploy.probe --run_id my-albert --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

It retries for --bootstrap_timeout seconds, and takes no part in the training.
"""

import tempfile
from pathlib import Path

from arguments import BaseTrainingArguments
from cotrain.common.errors import UserError, run_script
from cotrain.common.flags import parse_arguments
from cotrain.common.processes import StopSignal, exit_after, guard_children


def main() -> None:
    with StopSignal() as stop:
        (args,) = parse_arguments([BaseTrainingArguments], __doc__)
        if not args.initial_peers:
            raise UserError("--initial_peers is missing: pass the address of a peer of the run")
        guard_children()
        probe(args, stop)


def probe(args: BaseTrainingArguments, stop: StopSignal) -> None:
    from cotrain.common.logs import setup_logging
    from cotrain.peer.peer import open_peer
    from utils import LocalMetrics, get_dictionary

    setup_logging(args.debug)
    exit_after(args.bootstrap_timeout + 60.0, 1, "The probe did not finish in time")
    with tempfile.TemporaryDirectory() as folder, open_peer(args, Path(folder), client_mode=True, stop=stop) as peer:
        records = get_dictionary(peer.dht, f"{args.run_id}_metrics").values()
        steps = [LocalMetrics.parse_obj(record.value).step for record in records]
        newest = f"step #{max(steps)}" if steps else "no step yet"
        print(f"Joined the run '{args.run_id}': {len(steps)} trainers reported in the last minutes, {newest}")


if __name__ == "__main__":
    run_script(main)
