#!/usr/bin/env python3
"""Train together with others in a training loop of your own: plain PyTorch, no Trainer.

It takes the flags of run_trainer.py and can train in the same run:

    ./run_custom_trainer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

Copy this file and change the loop below. It must do three things: call `join` first, `optimizer.step()` after each
`batch_size_per_step` samples, and `after_local_step` after that.
"""

from collections.abc import Iterable, Iterator

from lib.common.cli import parse_arguments
from lib.common.errors import run_script
from lib.common.processes import StopSignal, guard_children
from run_trainer import ARGUMENTS


def main() -> None:
    with StopSignal() as stop:
        args = parse_arguments(ARGUMENTS, __doc__)
        guard_children()
        train(*args, stop)


def train(training_args, dataset_args, collaboration_args, averager_args, tracker_args, stop: StopSignal) -> None:
    import torch  # seconds of imports, which --help and a wrong flag need not wait for
    from torch.utils.data import DataLoader

    from lib.data.download import fetch_data
    from lib.data.loading import load_training_data
    from lib.training.hf_trainer import PeerSampler, autocast_dtype, choose_devices
    from lib.training.model import derive_seed, enable_gradient_checkpointing, load_config, load_tokenizer, make_model
    from lib.training.session import join_collaboration
    from utils import logger, setup_logging

    setup_logging(collaboration_args.debug)
    device, _ = choose_devices(training_args)
    fetch_data(dataset_args, training_args.disable_tqdm)
    tokenizer = load_tokenizer(dataset_args.tokenizer_path)
    config = load_config(dataset_args, tokenizer)
    dataset, collator = load_training_data(dataset_args, training_args, tokenizer, config)
    model = make_model(config, dataset_args, collaboration_args.run_id).to(device)
    if training_args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    model.train()

    num_micro_batches = training_args.gradient_accumulation_steps
    with join_collaboration(
        model,
        training_args.batch_size_per_step(1),
        training_args,
        collaboration_args,
        averager_args,
        tracker_args,
        stop,
    ) as member:
        optimizer, callback = member.optimizer, member.callback
        peer_id = str(member.peer.dht.peer_id)
        torch.manual_seed(derive_seed(peer_id, training_args.seed))  # masks and dropout are this peer's own
        loader = DataLoader(
            dataset,
            training_args.per_device_train_batch_size,
            sampler=PeerSampler(len(dataset), peer_id, training_args.seed, optimizer),  # and so is the order
            collate_fn=collator,
            drop_last=True,  # each local step reports the same number of samples
            num_workers=training_args.dataloader_num_workers,
            pin_memory=device.type == "cuda",
        )
        dtype = autocast_dtype(training_args)
        scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

        member.restore_checkpoint()
        callback.join()  # takes the state of those who are further
        for number, batch in enumerate(endless(loader), start=1):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = model(**batch).loss
            scaler.scale(loss / num_micro_batches).backward()
            callback.loss_meter.add(loss)
            if number % num_micro_batches:
                continue
            # Adds to what this peer contributes; once all peers together have target_batch_size samples, averages and
            # takes the global step. The contribution as a whole is clipped there, to --max_grad_norm.
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            local_step = number // num_micro_batches
            if local_step == 1 or local_step % training_args.logging_steps == 0:
                logger.info(f"Local step {local_step}: loss = {loss.item():.5f}")
            if not callback.after_local_step():
                break
            if local_step % training_args.save_steps == 0:
                member.save_checkpoint(model, tokenizer, training_args.save_total_limit)
        member.save_checkpoint(model, tokenizer, training_args.save_total_limit)
        callback.leave()


def endless(loader: Iterable) -> Iterator:
    """One pass over the data after the other."""
    while True:
        yield from loader


if __name__ == "__main__":
    run_script(main)
