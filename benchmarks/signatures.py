#!/usr/bin/env python3
"""Measure what the signatures of members cost a round: benchmarks/signatures.py --peers 16

The peers run in this process, over a simulated network, with real keys. Of the CPU, all that this process uses between
two global steps counts as the round's, local steps of a model that is one tensor included. Of the bytes, those of the
messages of rounds count, not the reports. Needs no network.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.rounds import claims, known_peers
from tests.support import scenario as scenarios
from tests.support import simulated_network

FIRST_STEPS = 3  # of newcomers; not counted
FACTOR = 4.0  # simulated seconds per second, so that 16 peers keep up on one core


class Meter:
    """CPU seconds and bytes of signatures, and the bytes of all messages of rounds."""

    def __init__(self):
        self.counts = Counter()

    def timed(self, name: str, function: Callable) -> Callable:
        def call(*args: object) -> object:
            began = time.thread_time()
            result = function(*args)
            self.counts.update({name: time.thread_time() - began, f"{name} calls": 1})
            return result

        return call

    def carry(self, pass_links: Callable) -> Callable:
        async def call(network: object, sender: object, receiver: object, message: object) -> None:
            if hasattr(message, "ByteSize"):
                entries = [entry for entry in getattr(message, "gathered", ()) if entry]
                entries += [message.gather] if getattr(message, "gather", b"") else []
                self.counts.update({"bytes": message.ByteSize()})
                self.counts.update({"signature bytes": claims.SIGNATURE_BYTES * len(entries)})
            await pass_links(network, sender, receiver, message)

        return call


def measure(num_peers: int, num_parameters: int, num_steps: int) -> str:
    """Return the figures of some rounds."""
    meter, keys = Meter(), {}
    for _ in range(num_peers):
        key = RSAPrivateKey()
        keys[RSASignatureValidator(key).local_public_key] = key
    subkeys = iter(keys)
    network = simulated_network.Network
    with (
        mock.patch.multiple(scenarios, NUM_PARAMETERS=num_parameters, PART_BYTES=2**19),
        mock.patch.multiple(simulated_network, make_subkey=lambda _: next(subkeys), SimulatedKey=keys.__getitem__),
        mock.patch.object(known_peers, "sign", meter.timed("sign", claims.sign)),
        mock.patch.object(network, "_verify", staticmethod(meter.timed("verify", claims.verify))),
        mock.patch.object(network, "_pass_links", meter.carry(network._pass_links)),
        scenarios.Scenario(0, FACTOR, target_batch_size=num_peers * scenarios.BATCH * 8) as run,
    ):
        for _ in range(num_peers):
            run.add(uplink=1e8)
        run.reach(FIRST_STEPS, seconds=600.0)
        meter.counts.clear()
        began, first = time.process_time(), min(run.steps_of())
        run.reach(first + num_steps, seconds=600.0)
        seconds, steps, counts = time.process_time() - began, min(run.steps_of()) - first, meter.counts.copy()
        outcomes = Counter(outcome for peer in run.peers for outcome in peer.outcomes()[-steps:])
    signing, all_bytes, per_peer = counts["sign"] + counts["verify"], counts["bytes"], steps * num_peers
    return (
        f"{num_peers} peers, {num_parameters:,} parameters, {steps} steps {dict(outcomes)}: for each peer and round "
        f"{counts['sign calls'] / per_peer:.1f} signatures made and {counts['verify calls'] / per_peer:.1f} checked: "
        f"{1000 * signing / per_peer:.2f} of {1000 * seconds / per_peer:.1f} CPU milliseconds "
        f"({signing / seconds:.2%}), {counts['signature bytes'] / per_peer:,.0f} of {all_bytes / per_peer:,.0f} bytes "
        f"sent ({counts['signature bytes'] / all_bytes:.2%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--parameters", type=int, default=250_000)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    print(measure(args.peers, args.parameters, args.steps))


if __name__ == "__main__":
    main()
