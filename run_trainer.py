#!/usr/bin/env python3
"""Train a language model together with others: compute gradients and average them with the other peers.

Join a collaboration with

    ./run_trainer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

where the address is one that a training monitor, or any trainer, prints when it starts.
"""

from arguments import (
    AveragerArguments,
    CollaborationArguments,
    DatasetArguments,
    LocalTrainingArguments,
    ProgressTrackerArguments,
)
from lib.common.cli import parse_arguments
from lib.common.errors import run_script
from lib.common.processes import StopSignal, guard_children

ARGUMENTS = (
    LocalTrainingArguments,
    DatasetArguments,
    CollaborationArguments,
    AveragerArguments,
    ProgressTrackerArguments,
)


def main() -> None:
    with StopSignal() as stop:
        args = parse_arguments(ARGUMENTS, __doc__)
        guard_children()
        train(*args, stop)


def train(
    training_args: LocalTrainingArguments,
    dataset_args: DatasetArguments,
    collaboration_args: CollaborationArguments,
    averager_args: AveragerArguments,
    tracker_args: ProgressTrackerArguments,
    stop: StopSignal,
) -> None:
    # Seconds of imports, which --help and a wrong flag need not wait for.
    from lib.data.download import fetch_data
    from lib.data.loading import load_training_data
    from lib.training.hf_trainer import (
        PeerSampler,
        build_trainer,
        build_training_arguments,
        choose_devices,
        find_checkpoint,
    )
    from lib.training.model import enable_gradient_checkpointing, load_config, load_tokenizer, make_model
    from lib.training.session import join_collaboration
    from utils import setup_logging

    setup_logging(collaboration_args.debug)
    device, num_devices = choose_devices(training_args)
    fetch_data(dataset_args, training_args.disable_tqdm)
    tokenizer = load_tokenizer(dataset_args.tokenizer_path)
    config = load_config(dataset_args, tokenizer)
    dataset, collator = load_training_data(dataset_args, training_args, tokenizer, config)
    model = make_model(config, dataset_args, collaboration_args.run_id).to(device)
    if training_args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    batch_size_per_step = training_args.batch_size_per_step(num_devices)

    with join_collaboration(
        model, batch_size_per_step, training_args, collaboration_args, averager_args, tracker_args, stop
    ) as member:
        peer_id = str(member.peer.dht.peer_id)
        training_arguments = build_training_arguments(training_args, peer_id)
        sampler = PeerSampler(len(dataset), peer_id, training_args.seed, member.optimizer, batch_size_per_step)
        trainer = build_trainer(
            model, tokenizer, dataset, collator, member.optimizer, training_arguments, sampler, member.callback
        )
        trainer.train(resume_from_checkpoint=find_checkpoint(training_args.output_dir))
        member.callback.leave()


if __name__ == "__main__":
    run_script(main)
