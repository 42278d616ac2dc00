#!/usr/bin/env python3
"""Run a peer that trains at a fixed pace with random gradients: the network is real, the computation is not.

benchmarks/lines_peer.py --local_step_seconds 2 --interface wan FLAGS OF run_trainer.py

DHT, optimizer, matchmaking and rounds are those of run_trainer.py, so that a round costs what it costs there. A local
step sleeps. While a global step is applied no local step is taken, as on a peer whose rounds are shorter than its
global steps; with --in_background only as the optimizer waits by itself. Output: rounds.jsonl and traffic.jsonl in
--output_dir, the latter with one line per global step.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from arguments import CollaborationArguments, LocalTrainingArguments, ModelArguments, ProgressTrackerArguments
from cotrain.common.argument_parser import parse_arguments
from cotrain.common.errors import run_script
from cotrain.common.flags import Flags, flag
from cotrain.common.signals import StopSignal
from cotrain.options import NOTHING, TrainerOptions
from peerstep.peer.processes import guard_children
from tests.support.altered import Recorder


@dataclass
class PaceArguments(Flags, group="Pace"):
    """The simulated computation."""

    local_step_seconds: float = flag(2.0, "Seconds of a local step")
    start_file: str | None = flag(None, "Take no local step before this file exists. Default: begin at once")
    in_background: bool = flag(False, "Take local steps during rounds, as trainers do")
    interface: str = flag("wan", "Network interface whose bytes are recorded")


def read_traffic(interface: str) -> tuple[int, int]:
    """Return the bytes that this host has sent and received through an interface, with all headers."""
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            values = [int(value) for value in counters.split()]
            return values[8], values[0]
    raise ValueError(f"no network interface {interface}")


def train(
    pace_args: PaceArguments,
    training_args: LocalTrainingArguments,
    model_args: ModelArguments,
    collaboration_args: CollaborationArguments,
    tracker_args: ProgressTrackerArguments,
    stop: StopSignal,
) -> None:
    import torch

    from cotrain.common.json_file import JsonLinesFile
    from cotrain.common.logs import setup_logging
    from cotrain.dht.run_records import record_schemas
    from cotrain.models.model import read_config
    from cotrain.peer.addresses import log_visible_maddrs
    from cotrain.peer.peer import open_peer
    from cotrain.training.builders import build_optimizer
    from peerstep.local_peer import supervise
    from peerstep.tensors.memory import share_parameters
    from tests.support.models import build_model

    setup_logging(collaboration_args.debug)
    model = build_model(read_config(model_args.model_name_or_path), collaboration_args.run_id)
    share_parameters(model)  # as load_workload does
    output_dir = Path(training_args.output_dir)
    with ExitStack() as stack:
        schemas = record_schemas(collaboration_args.run_id)
        client_mode = collaboration_args.client_mode
        peer = stack.enter_context(open_peer(collaboration_args, schemas, output_dir, client_mode, stop))
        log_visible_maddrs(peer.dht.get_visible_maddrs(), only_p2p=False)
        args = TrainerOptions(training_args, None, collaboration_args, tracker_args, NOTHING)
        optimizer = build_optimizer(model, peer, training_args.batch_size_per_step(1), args)
        stack.callback(optimizer.shutdown)
        stack.enter_context(supervise({"DHT": peer.dht, **optimizer.processes}, seconds=15.0, exit_code=1))
        optimizer.on_round = JsonLinesFile(output_dir / "rounds.jsonl", max_bytes=2**24).write
        recorder = Recorder(output_dir / "traffic.jsonl")

        torch.manual_seed(int.from_bytes(peer.public_key[-4:], "big"))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)  # the same at each local step
        print("Ready", flush=True)
        while pace_args.start_file is not None and not Path(pace_args.start_file).exists():
            stop.event.wait(0.1)
            if stop.event.is_set():
                return
        step, computed = optimizer.local_epoch, 0.0
        while not stop.event.wait(pace_args.local_step_seconds):
            computed += pace_args.local_step_seconds
            optimizer.step()
            if not pace_args.in_background:
                with optimizer.tracker.pause_updates():
                    optimizer.finish_pending_update()
            if optimizer.local_epoch != step:
                step = optimizer.local_epoch
                sent, received = read_traffic(pace_args.interface)
                recorder.write("step", step=step, sent=sent, received=received, computed=computed)


def main() -> None:
    with StopSignal() as stop:
        args = parse_arguments(
            (
                PaceArguments,
                LocalTrainingArguments,
                ModelArguments,
                CollaborationArguments,
                ProgressTrackerArguments,
            ),
            __doc__,
        )
        guard_children()
        train(*args, stop)


if __name__ == "__main__":
    run_script(main)
