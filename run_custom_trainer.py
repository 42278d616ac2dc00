#!/usr/bin/env python3
"""Train a model together with other peers, in a plain PyTorch training loop without transformers' Trainer.

The script takes the flags of run_trainer.py and can train in the same run:

    ./run_custom_trainer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

To use another training loop, copy this file and change the loop below. The loop must call `session.join` first,
`optimizer.step` after each `batch_size_per_step` samples, and `session.after_local_step` after each `optimizer.step`.
"""

from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path

from arguments import TrainerArguments
from cotrain.common.errors import run_script
from cotrain.common.processes import StopSignal
from cotrain.training.start import start_trainer


def train(args: TrainerArguments, stop: StopSignal) -> None:
    # These imports take seconds, which --help and usage errors do not need.
    import torch
    from accelerate.utils import send_to_device
    from hivemind.utils import get_logger
    from torch.utils.data import DataLoader

    from cotrain.models.model import derive_seed
    from cotrain.peer.peer import open_peer
    from cotrain.training.hf_trainer import PeerSampler, autocast_dtype
    from cotrain.training.optimizer import build_optimizer
    from cotrain.training.session import open_session
    from cotrain.training.workload import load_workload

    logger = get_logger(__name__)
    work = load_workload(args)  # task, samples, model
    task, device, model = work.task, work.device, work.model.to(work.device).train()
    training_args, num_micro_batches = args.training, args.training.gradient_accumulation_steps
    output_dir = Path(args.training.output_dir)
    with ExitStack() as stack:
        # DHT peer
        peer = stack.enter_context(open_peer(args.collaboration, output_dir, args.collaboration.client_mode, stop))
        peer_id = str(peer.dht.peer_id)

        # hivemind's optimizer, around LAMB or AdamW
        batch_size_per_step = training_args.batch_size_per_step(num_devices=1)
        optimizer = build_optimizer(model, peer, batch_size_per_step, args)
        stack.callback(optimizer.shutdown)

        # Session: joining, metrics, rollback, checkpoints
        session = stack.enter_context(open_session(peer, optimizer, task, model, args, stop))

        torch.manual_seed(derive_seed(peer_id, training_args.seed))  # masks and dropout differ between peers
        loader = DataLoader(
            work.samples,
            training_args.per_device_train_batch_size,
            sampler=PeerSampler(len(work.samples), peer_id, training_args.seed, optimizer),  # and so does the order
            collate_fn=task.collate,
            drop_last=True,  # each local step reports the same number of samples
            num_workers=training_args.dataloader_num_workers,
            pin_memory=device.type == "cuda",
        )
        dtype = autocast_dtype(training_args)
        scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

        session.restore_checkpoint()
        session.join()  # downloads the state of peers that are at a later step
        for number, batch in enumerate(chain.from_iterable(repeat(loader)), start=1):  # pass after pass
            batch = send_to_device(batch, device, non_blocking=True)
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = task.compute_loss(model, batch)
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
                session.save_checkpoint()
        session.save_checkpoint()
        session.leave()


def main() -> None:
    start_trainer(train, __doc__)


if __name__ == "__main__":
    run_script(main)
