#!/usr/bin/env python3
"""Train a language model together with other peers, in a plain PyTorch training loop without transformers' Trainer.

The script takes the flags of run_trainer.py and can train in the same run:

    ./run_custom_trainer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

To use another training loop, copy this file and change the loop below. The loop must call `session.join` first,
`optimizer.step` after each `batch_size_per_step` samples, and `session.after_local_step` after each `optimizer.step`.
"""

import sys
from collections.abc import Iterable, Iterator
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
    import torch
    from hivemind.utils import get_logger
    from torch.utils.data import DataLoader

    from lib.common.logs import setup_logging
    from lib.data.download import fetch_data
    from lib.data.loading import load_training_data
    from lib.data.tokenizers import load_tokenizer
    from lib.peer.addresses import log_visible_maddrs
    from lib.peer.lifecycle import open_peer, supervise
    from lib.peer.run_config import RunConfigRelay
    from lib.training.hf_trainer import PeerSampler, autocast_dtype, choose_devices
    from lib.training.model import (
        build_trainer_model,
        derive_seed,
        enable_gradient_checkpointing,
        load_config,
    )
    from lib.training.optimizer import build_optimizer
    from lib.training.session import TrainingSession

    setup_logging(collaboration_args.debug)
    logger = get_logger(__name__)

    # Data and model
    device, _ = choose_devices(training_args)
    fetch_data(dataset_args, training_args.disable_tqdm)
    tokenizer = load_tokenizer(dataset_args.tokenizer_path)
    config = load_config(dataset_args, tokenizer)
    dataset, collator = load_training_data(dataset_args, training_args, tokenizer, config)
    model = build_trainer_model(config, dataset_args, collaboration_args.run_id).to(device)
    if training_args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    model.train()

    output_dir = Path(training_args.output_dir)
    num_micro_batches = training_args.gradient_accumulation_steps
    with ExitStack() as stack:
        # DHT peer
        peer = stack.enter_context(open_peer(collaboration_args, output_dir, collaboration_args.client_mode, stop))
        if not collaboration_args.client_mode:
            log_visible_maddrs(peer.dht.get_visible_maddrs(), only_p2p=collaboration_args.use_ipfs)
        peer_id = str(peer.dht.peer_id)
        relay = RunConfigRelay.of_run(
            peer, (training_args, dataset_args, collaboration_args, averager_args), collaboration_args
        )

        # hivemind's optimizer, around LAMB or AdamW
        optimizer = build_optimizer(
            model,
            peer,
            training_args.batch_size_per_step(1),
            training_args,
            collaboration_args,
            averager_args,
            tracker_args,
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

        torch.manual_seed(derive_seed(peer_id, training_args.seed))  # masks and dropout differ between peers
        loader = DataLoader(
            dataset,
            training_args.per_device_train_batch_size,
            sampler=PeerSampler(len(dataset), peer_id, training_args.seed, optimizer),  # and so does the order
            collate_fn=collator,
            drop_last=True,  # each local step reports the same number of samples
            num_workers=training_args.dataloader_num_workers,
            pin_memory=device.type == "cuda",
        )
        dtype = autocast_dtype(training_args)
        scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

        session.restore_checkpoint()
        session.join()  # downloads the state of peers that are at a later step
        for number, batch in enumerate(endless(loader), start=1):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = model(**batch).loss
            scaler.scale(loss / num_micro_batches).backward()
            session.loss_meter.add(loss)
            if number % num_micro_batches:
                continue
            # Accumulates the gradients. Once all peers together have target_batch_size samples, the optimizer averages
            # the gradients and takes the global step. It clips this peer's mean gradient to --max_grad_norm then.
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            local_step = number // num_micro_batches
            if local_step == 1 or local_step % training_args.logging_steps == 0:
                logger.info(f"Local step {local_step}: loss = {loss.item():.5f}")
            if not session.after_local_step():
                break
            if local_step % training_args.save_steps == 0:
                session.save_checkpoint(model, tokenizer, training_args.save_total_limit)
        session.save_checkpoint(model, tokenizer, training_args.save_total_limit)
        session.leave()


def endless(loader: Iterable) -> Iterator:
    """Yield batches in an unlimited number of passes over the data."""
    while True:
        yield from loader


if __name__ == "__main__":
    run_script(main)
