"""transformers' Trainer for a collaboration, and the workarounds that it needs."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import Dataset
from hivemind.utils import get_logger
from safetensors import safe_open
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler
from transformers import PrinterCallback, Trainer, TrainingArguments

from arguments import LocalTrainingArguments
from lib.averaging.optimizer import Optimizer
from lib.common.atomic_files import new_folder
from lib.common.errors import UserError, first_line
from lib.training import checkpoints
from lib.training.loss_meter import LossMeter
from lib.training.model import derive_seed

logger = get_logger(__name__)

# Local steps without end: a peer computes gradients until it is stopped, or the collaboration is done.
_ENDLESS = 2**31 - 1


class PeerSampler(Sampler):
    """A random order of samples that is this peer's own.

    It depends on the peer ID, the seed, the collaboration's step at which a pass begins, and the number of the pass:
    two peers see different orders, the same peer sees the same one again if it starts at the same step, and goes on
    with new ones if it restarts later.

    :param batch_size_per_step: samples of a local step. A pass has a multiple of that: it leaves out the last samples
        of its order or, of data that has fewer, takes some twice. At the end of a pass the Trainer would make a local
        step of what is left, and hivemind's optimizer counts each as a full one.
    """

    def __init__(self, length: int, peer_id: str, seed: int, optimizer: Optimizer, batch_size_per_step: int = 1):
        self.length, self.peer_id, self.seed, self.optimizer = length, peer_id, seed, optimizer
        self.pass_length = max(1, length // batch_size_per_step) * batch_size_per_step
        self.num_passes = 0

    def __len__(self) -> int:
        return self.pass_length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self.peer_id, self.seed, self.optimizer.local_epoch, self.num_passes))
        self.num_passes += 1
        num_permutations = math.ceil(self.pass_length / self.length)
        permutations = [torch.randperm(self.length, generator=generator) for _ in range(num_permutations)]
        yield from torch.cat(permutations)[: self.pass_length].tolist()


class NoOpScheduler(LRScheduler):
    """For the Trainer, which wants one. The real scheduler is inside hivemind's optimizer, where steps are global."""

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        self._last_lr = self.get_lr()

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        self._last_lr = self.get_lr()


class CollaborativeTrainer(Trainer):
    """Computes gradients for hivemind's optimizer, on samples in this peer's own order.

    :param sampler: the order of the samples
    :param loss_meter: is told the loss of each micro-batch
    """

    def __init__(self, *args, sampler: PeerSampler, loss_meter: LossMeter, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampler, self.loss_meter = sampler, loss_meter
        self.collaborative_optimizer: Optimizer = self.optimizer  # the Trainer wraps self.optimizer later
        self.remove_callback(PrinterCallback)  # prints to stdout what CollaborativeCallback logs

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> PeerSampler:
        return self.sampler

    def compute_loss(self, model, inputs, return_outputs: bool = False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.loss_meter.add(loss)
        return (loss, outputs) if return_outputs else loss

    def _save_checkpoint(self, model, trial) -> None:
        """Write a Trainer checkpoint as checkpoints.py does: complete or not at all, the newest by step kept."""
        final = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            with (
                self.collaborative_optimizer.frozen_state(),  # or weights and optimizer would be of two steps
                new_folder(final, "--output_dir", overwrite=True, replaceable=("config.json",)) as temporary,
            ):
                self._write_checkpoint(temporary, model, trial)
        except OSError as error:
            logger.error(f"Could not save {final}: {error.strerror}. Training goes on, the checkpoint before it stays")
            return
        checkpoints.remove_old_checkpoints(Path(self.args.output_dir), keep=self.args.save_total_limit)

    def _write_checkpoint(self, temporary: Path, model, trial) -> None:
        """The Trainer writes RUN_DIR/checkpoint-N and rotates RUN_DIR: give it one of its own, take N out of it."""
        self._run_dir = temporary
        try:
            super()._save_checkpoint(model, trial)
        finally:
            del self._run_dir
        (written,) = temporary.iterdir()
        for path in written.iterdir():
            path.rename(temporary / path.name)
        written.rmdir()

    def _get_output_dir(self, trial) -> str:
        return str(getattr(self, "_run_dir", None) or super()._get_output_dir(trial))


def choose_devices(args: LocalTrainingArguments) -> tuple[torch.device, int]:
    """Where to compute, and on how many devices: all GPUs of this machine, or its CPU.

    :raises UserError: if the flags ask for a precision that the device does not have
    """
    choose_precision(args)
    num_gpus = 0 if args.use_cpu else torch.cuda.device_count()
    return torch.device("cuda:0" if num_gpus else "cpu"), max(1, num_gpus)


def choose_precision(args: LocalTrainingArguments) -> tuple[bool, bool]:
    """Whether to use (fp16, bf16): as asked, or what the device is good at.

    :raises UserError: if the device does not have what was asked for
    """
    has_gpu = torch.cuda.is_available() and not args.use_cpu
    if args.fp16 and not has_gpu:
        raise UserError(
            "--fp16 needs a GPU, and none is in use here; drop it (transformers would accept and ignore it)"
        )
    if args.bf16 and has_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"--bf16: {torch.cuda.get_device_name()} does not have it; pass --fp16 or nothing")
    if args.fp16 or args.bf16 or args.fp32 or not has_gpu:
        return args.fp16, args.bf16
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return not has_bf16, has_bf16


def autocast_dtype(args: LocalTrainingArguments) -> torch.dtype | None:
    """For torch.autocast in a loop of one's own; None for no mixed precision."""
    fp16, bf16 = choose_precision(args)
    return torch.float16 if fp16 else torch.bfloat16 if bf16 else None


def build_training_arguments(args: LocalTrainingArguments, peer_id: str) -> TrainingArguments:
    """Our flags for transformers. What the collaboration decides (schedule, optimizer, clipping) is switched off."""
    fp16, bf16 = choose_precision(args)
    return TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        max_steps=_ENDLESS,
        max_grad_norm=0.0,  # clipped once per global step instead, see RoundAverager
        learning_rate=args.learning_rate,
        fp16=fp16,
        bf16=bf16,
        use_cpu=args.use_cpu,
        dataloader_num_workers=args.dataloader_num_workers,
        dataloader_pin_memory=torch.cuda.is_available() and not args.use_cpu,
        dataloader_drop_last=True,  # each local step reports the same number of samples
        remove_unused_columns=False,  # it would take special_tokens_mask away from the collator
        seed=derive_seed(peer_id, args.seed) % 2**32,  # masks and dropout; numpy takes 32 bits
        ignore_data_skip=True,  # the order moves on by itself, see PeerSampler
        logging_steps=args.logging_steps,
        logging_first_step=args.logging_first_step,
        logging_nan_inf_filter=False,  # it would hide a loss that is not finite
        save_steps=args.save_steps,
        save_total_limit=args.save_total_limit,
        disable_tqdm=True,
        report_to="none",
    )


def find_checkpoint(output_dir: str) -> str | None:
    """The newest Trainer checkpoint that is complete; one that cannot be read is skipped with a message."""
    for path in checkpoints.list_checkpoints(Path(output_dir)):
        try:
            json.loads((path / "trainer_state.json").read_text())
            with safe_open(path / "model.safetensors", framework="pt") as weights:
                weights.keys()
            optimizer_state = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
            optimizer_state["state"]["local_epoch"]
            return str(path)
        except Exception as error:
            logger.warning(f"Skipping {path}, which cannot be read ({type(error).__name__}: {first_line(error)})")
    return None
