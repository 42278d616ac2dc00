#!/usr/bin/env python3
"""Train a model together with other peers, in a plain PyTorch training loop without transformers' Trainer.

The script takes the flags of run_trainer.py and can train in the same run:

    ./run_custom_trainer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

Copy this file for a loop that differs from cotrain/training/loop.py. A script that needs none of the flags is shorter
with `join_run`, see examples/plain_loop.py.
"""

from cotrain.common.errors import run_script  # isort: skip
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from arguments import TRAINER_ARGUMENTS
from cotrain.common.signals import StopSignal
from cotrain.options import TrainerOptions
from cotrain.training.start import start_trainer


def train(args: TrainerOptions, stop: StopSignal) -> None:
    # These imports take seconds, which --help and usage errors do not need.
    from cotrain.peer.peer import open_peer
    from cotrain.training.builders import build_optimizer
    from cotrain.training.loop import open_loop
    from cotrain.training.session import open_session
    from cotrain.training.workload import load_workload
    from utils import make_validators, publish_metrics

    work = load_workload(args)  # task, samples, model
    task, model = work.task, work.model.to(work.device).train()
    with ExitStack() as stack:
        # DHT peer
        output_dir = Path(args.training.output_dir)
        validators = make_validators(args.collaboration.run_id)
        client_mode = args.collaboration.client_mode
        peer = stack.enter_context(open_peer(args.collaboration, validators, output_dir, client_mode, stop))

        # The collaborative optimizer (peerstep), around LAMB, AdamW or Muon
        batch_size_per_step = args.training.batch_size_per_step(num_devices=1)
        optimizer = build_optimizer(model, peer, batch_size_per_step, args)
        stack.callback(optimizer.shutdown)
        optimizer.tracker.schema += task.schema  # trainers with another tokenizer are ignored

        # Session: joining, metrics, rollback, checkpoints
        session = stack.enter_context(open_session(peer, optimizer, task, model, args, stop))
        session.on_report = partial(publish_metrics, peer, args.collaboration.statistics_expiration)

        # PyTorch's loop, over micro-batches in this peer's own order
        loop = stack.enter_context(open_loop(session, args.training, work.device))
        num_workers = args.training.dataloader_num_workers
        for batch in loop.batches(work.samples, collate_fn=task.collate, num_workers=num_workers):
            loop.train_on(batch, partial(task.compute_loss, model), task.weigh)


def main() -> None:
    start_trainer(train, TRAINER_ARGUMENTS, __doc__)


if __name__ == "__main__":
    run_script(main)
