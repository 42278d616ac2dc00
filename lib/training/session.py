"""What surrounds the work of each peer: started in the right order, and ended in the reverse one on every path."""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from hivemind.utils import get_logger
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from arguments import (
    AveragerArguments,
    BaseTrainingArguments,
    CollaborationArguments,
    HyperparameterArguments,
    LocalTrainingArguments,
    ProgressTrackerArguments,
)
from callback import CollaborativeCallback
from lib.averaging.optimizer import Optimizer, make_round_log
from lib.averaging.state import TrainingStateAverager
from lib.common.atomic_files import remove_leftovers
from lib.common.processes import StopSignal, Watchdog, exit_after
from lib.peer.tunnel import open_tunnel
from lib.training import checkpoints
from lib.training.checkpoints import TrainingState, lock_folder
from lib.training.optimizer import build_optimizer, build_state_averager
from utils import KeepInTouch, Peer, log_visible_maddrs, start_peer

logger = get_logger(__name__)


@contextlib.contextmanager
def running_peer(
    args: BaseTrainingArguments, output_dir: Path, client_mode: bool, stop: StopSignal, may_start_alone: bool = False
) -> Iterator[Peer]:
    """A DHT peer that has joined the others and stays in touch with them, alone in its folder.

    :param may_start_alone: without the others if none of them answers
    :raises UserError: if the folder is another peer's, or nobody can be reached
    """
    with lock_folder(output_dir, "--output_dir"), open_tunnel(args):
        remove_leftovers(output_dir)
        stop.defer()
        identity_path = Path(args.identity_path or output_dir / "identity.key")
        peer = start_peer(args, identity_path, client_mode, stop.event, may_start_alone)
        keep_in_touch = KeepInTouch(peer.dht, args.initial_peers)
        keep_in_touch.start()
        try:
            yield peer
        finally:
            keep_in_touch.stop()
            peer.dht.shutdown()


@contextlib.contextmanager
def watched(children: dict[str, multiprocessing.Process], seconds: float, exit_code: int) -> Iterator[None]:
    """End the process if one of its children dies, or if shutting them down afterwards takes longer than `seconds`."""
    watchdog = Watchdog(children)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
        exit_after(seconds, exit_code, "hivemind does not shut down")


@contextlib.contextmanager
def running_observer(
    model: torch.nn.Module,
    peer: Peer,
    run_id: str,
    hyperparameters: HyperparameterArguments,
    load_state_timeout: float,
) -> Iterator[TrainingStateAverager]:
    """What downloads the trainers' state into `model` for a peer that does not train. Call it in the main thread."""
    averager = build_state_averager(model, peer, run_id, hyperparameters, load_state_timeout)
    try:
        with watched({"averager": averager}, seconds=12.0, exit_code=0):
            yield averager
    finally:
        averager.shutdown()


@dataclass
class Membership:
    """A trainer's part in a collaboration."""

    peer: Peer
    optimizer: Optimizer
    callback: CollaborativeCallback
    run_id: str
    output_dir: Path

    def restore_checkpoint(self) -> None:
        """Go on from the newest of our own checkpoints, if there is one."""
        checkpoints.restore_newest(self.output_dir, self.run_id, self.optimizer.state_averager)

    def save_checkpoint(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, keep: int) -> None:
        """Write a checkpoint of the global step that we are at, and keep the newest few."""
        with self.optimizer.frozen_state():
            state = TrainingState(self.run_id, *self.optimizer.state_averager.snapshot())
            try:
                checkpoints.save_checkpoint(self.output_dir, model, tokenizer, state, info={"time": time.time()})
            except OSError as error:
                logger.error(
                    f"Could not save a checkpoint: {error.strerror}. Training continues, the one before it stays"
                )
                return
        checkpoints.remove_old_checkpoints(self.output_dir, keep)


@contextlib.contextmanager
def join_collaboration(
    model: torch.nn.Module,
    batch_size_per_step: int,
    training_args: LocalTrainingArguments,
    collaboration_args: CollaborationArguments,
    averager_args: AveragerArguments,
    tracker_args: ProgressTrackerArguments,
    stop: StopSignal,
) -> Iterator[Membership]:
    """Become a peer that trains `model`, which is on its device already. Call it in the main thread.

    :param batch_size_per_step: samples between two calls of the optimizer's `step`
    :raises UserError: if the flags do not go together, or nobody can be reached
    """
    output_dir = Path(training_args.output_dir)
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(running_peer(collaboration_args, output_dir, collaboration_args.client_mode, stop))
        if not collaboration_args.client_mode:
            log_visible_maddrs(peer.dht.get_visible_maddrs(), only_p2p=collaboration_args.use_ipfs)
        optimizer = build_optimizer(
            model,
            peer,
            collaboration_args.run_id,
            batch_size_per_step,
            training_args.max_grad_norm,
            training_args,
            collaboration_args,
            averager_args,
            tracker_args,
        )
        stack.callback(optimizer.shutdown)
        optimizer.round_log = make_round_log(output_dir)
        averagers = {"state averager": optimizer.state_averager, "round averager": optimizer.grad_averager}
        stack.enter_context(watched({"DHT": peer.dht, **averagers}, seconds=15.0, exit_code=1))
        callback = CollaborativeCallback(
            peer, optimizer, model, collaboration_args, output_dir, stop.is_set, training_args.disable_tqdm
        )
        stack.callback(callback.close)
        yield Membership(peer, optimizer, callback, collaboration_args.run_id, output_dir)
