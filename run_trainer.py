#!/usr/bin/env python3
"""Train a language model together with other peers: compute gradients and average them with the group.

Join a collaboration with

    ./run_trainer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

where the address is one that the monitor or any trainer prints at its start.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

from arguments import (
    TRAINER_ARGUMENTS,
    AveragerArguments,
    CollaborationArguments,
    DatasetArguments,
    LocalTrainingArguments,
    ProgressTrackerArguments,
)
from lib.common.cli import parse_command_line
from lib.common.errors import run_script
from lib.common.processes import StopSignal, guard_children
from lib.training.status import show_status


def main() -> None:
    with StopSignal() as stop:
        line = parse_command_line(TRAINER_ARGUMENTS, __doc__)
        training_args = line.arguments[0]
        if training_args.status:
            sys.exit(show_status(Path(training_args.output_dir)))
        guard_children()
        from lib.peer.run_config import adopt_run_config  # seconds, which --help and usage errors do not need

        if training_args.check:
            from lib.training.check import check_trainer

            sys.exit(check_trainer(line, stop))
        train(*adopt_run_config(line, stop), stop)


def train(
    training_args: LocalTrainingArguments,
    dataset_args: DatasetArguments,
    collaboration_args: CollaborationArguments,
    averager_args: AveragerArguments,
    tracker_args: ProgressTrackerArguments,
    stop: StopSignal,
) -> None:
    # These imports take seconds, which --help and usage errors do not need.
    from callback import CollaborativeCallback
    from lib.common.logs import setup_logging
    from lib.data.download import fetch_data
    from lib.data.loading import load_training_data
    from lib.data.tokenizers import load_tokenizer
    from lib.peer.addresses import log_visible_maddrs
    from lib.peer.lifecycle import open_peer, supervise
    from lib.peer.run_config import RunConfigRelay
    from lib.training.hf_trainer import (
        CollaborativeTrainer,
        NoOpScheduler,
        PeerSampler,
        build_training_arguments,
        choose_devices,
        find_checkpoint,
    )
    from lib.training.model import build_trainer_model, enable_gradient_checkpointing, load_config
    from lib.training.optimizer import build_optimizer
    from lib.training.session import TrainingSession

    setup_logging(collaboration_args.debug)

    # Data and model
    device, num_devices = choose_devices(training_args)
    fetch_data(dataset_args, training_args.disable_tqdm)
    tokenizer = load_tokenizer(dataset_args.tokenizer_path)
    config = load_config(dataset_args, tokenizer)
    dataset, collator = load_training_data(dataset_args, training_args, tokenizer, config)
    model = build_trainer_model(config, dataset_args, collaboration_args.run_id).to(device)
    if training_args.gradient_checkpointing:
        enable_gradient_checkpointing(model)

    output_dir = Path(training_args.output_dir)
    batch_size_per_step = training_args.batch_size_per_step(num_devices)
    with ExitStack() as stack:
        # DHT peer
        peer = stack.enter_context(open_peer(collaboration_args, output_dir, collaboration_args.client_mode, stop))
        if not collaboration_args.client_mode:
            log_visible_maddrs(peer.dht.get_visible_maddrs(), only_p2p=collaboration_args.use_ipfs)
        peer_id = str(peer.dht.peer_id)
        relay = RunConfigRelay.of_run(
            peer, (training_args, dataset_args, collaboration_args, averager_args), collaboration_args
        )

        # hivemind's optimizer, around LAMB or AdamW. `step` counts a local step; once all peers together have
        # target_batch_size samples, the optimizer averages the gradients and takes the global step.
        optimizer = build_optimizer(
            model, peer, batch_size_per_step, training_args, collaboration_args, averager_args, tracker_args
        )
        stack.callback(optimizer.shutdown)
        children = {"DHT": peer.dht, **optimizer.processes}
        watchdog = stack.enter_context(supervise(children, 15.0, 1, collaboration_args.longest_wait))

        # Session: joining, metrics, rollback, checkpoints
        session = TrainingSession(
            peer,
            optimizer,
            model,
            collaboration_args,
            output_dir,
            stop.is_set,
            training_args.disable_tqdm,
            watchdog,
            relay,
        )
        stack.callback(session.close)

        # transformers' Trainer
        trainer = CollaborativeTrainer(
            model=model,
            args=build_training_arguments(training_args, peer_id),
            processing_class=tokenizer,
            data_collator=collator,
            train_dataset=dataset,
            optimizers=(optimizer, NoOpScheduler(optimizer)),
            callbacks=[CollaborativeCallback(session)],
            sampler=PeerSampler(len(dataset), peer_id, training_args.seed, optimizer, batch_size_per_step),
            loss_meter=session.loss_meter,
        )
        trainer.train(resume_from_checkpoint=find_checkpoint(training_args.output_dir))
        session.leave()


if __name__ == "__main__":
    run_script(main)
