#!/usr/bin/env python3
"""Train a model together with other peers: compute gradients and average them with the group.

Join a collaboration with

    ./run_trainer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

where the address is one that the monitor or any trainer prints at its start.
"""

from cotrain.common.errors import run_script  # isort: skip
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from arguments import TRAINER_ARGUMENTS
from cotrain.common.signals import StopSignal
from cotrain.options import TrainerOptions
from cotrain.training.start import start_trainer


def train(args: TrainerOptions, stop: StopSignal) -> None:
    # These imports take seconds, which --help and usage errors do not need.
    from callback import CollaborativeCallback
    from cotrain.peer.peer import open_peer
    from cotrain.training.builders import build_optimizer
    from cotrain.training.hf_trainer import CollaborativeTrainer, build_training_arguments
    from cotrain.training.session import open_session
    from cotrain.training.workload import load_workload
    from utils import make_validators, publish_metrics

    work = load_workload(args)  # task, samples, model
    task, model = work.task, work.model.to(work.device)
    batch_size_per_step = args.training.batch_size_per_step(work.num_devices)
    output_dir = Path(args.training.output_dir)
    with ExitStack() as stack:
        # DHT peer
        validators = make_validators(args.collaboration.run_id)
        client_mode = args.collaboration.client_mode
        peer = stack.enter_context(open_peer(args.collaboration, validators, output_dir, client_mode, stop))
        peer_id = str(peer.dht.peer_id)

        # The collaborative optimizer (peerstep), around LAMB, AdamW or Muon. `step` counts a local step; once all
        # peers together have target_batch_size samples, it averages the gradients and takes the global step.
        optimizer = build_optimizer(model, peer, batch_size_per_step, args)
        stack.callback(optimizer.shutdown)
        optimizer.tracker.schema += task.schema  # trainers with another tokenizer are ignored

        # Session: joining, metrics, rollback, checkpoints
        session = stack.enter_context(open_session(peer, optimizer, task, model, args, stop))
        session.on_report = partial(publish_metrics, peer, args.collaboration.statistics_expiration)

        # transformers' Trainer
        trainer = CollaborativeTrainer(
            model=model,
            args=build_training_arguments(args.training, peer_id),
            samples=work.samples,
            optimizer=optimizer,
            callbacks=[CollaborativeCallback(session)],
            task=task,
            sampler=session.open_sampler(work.samples, batch_size_per_step),
            loss_meter=session.loss_meter,
            num_devices=work.num_devices,
        )
        trainer.train()
        session.leave()


def main() -> None:
    start_trainer(train, TRAINER_ARGUMENTS, __doc__)


def join() -> None:
    """Run `cotrain-join ADDRESS …`, the command of the installed package."""
    if len(sys.argv) > 1 and sys.argv[1].startswith("/"):
        sys.argv.insert(1, "--initial_peers")
    run_script(main)


if __name__ == "__main__":
    run_script(main)
