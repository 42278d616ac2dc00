"""transformers' Trainer for a collaboration, with the workarounds that it needs."""

from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from hivemind.utils import get_logger
from torch.optim.lr_scheduler import MultiplicativeLR
from transformers import PrinterCallback, Trainer, TrainingArguments

from cotrain.common.errors import UserError
from cotrain.common.seeds import derive_seed
from cotrain.data.sampler import PeerSampler
from cotrain.models.device import find_device, supports_bf16
from cotrain.options import LocalOptions
from cotrain.status.loss_meter import LossMeter
from cotrain.task import Task
from cotrain.training.device_errors import MicroBatches, split

logger = get_logger(__name__)

# Number of local steps: a peer computes gradients until it is stopped or the collaboration ends.
_ENDLESS = 2**31 - 1
# Flags of a trainer that are transformers' arguments of the same name
_HANDED_ON = (
    "output_dir",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "dataloader_num_workers",
    "logging_steps",
    "logging_first_step",
    "save_steps",
)


class TaskLoss(torch.nn.Module):
    """The loss of a task as a module, for the Trainer. On several GPUs, DataParallel computes it in each replica.

    So the loss may use any attribute of the model. transformers 5.23 enables autocast only for models that it does not
    wrap in DataParallel. Autocast around the call of DataParallel has another effect: each replica runs in a thread,
    with the default dtype of autocast, which is float16 on GPUs (torch/nn/parallel/parallel_apply.py).
    `forward` takes no **kwargs: of one that does, the Trainer divides the loss by no gradient_accumulation_steps.

    :param dtype: of autocast; None: no autocast
    """

    def __init__(self, task: Task, model: torch.nn.Module, dtype: torch.dtype | None):
        super().__init__()
        self.task, self.model, self.dtype = task, model, dtype
        self.device_type = next(model.parameters()).device.type

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss times its weight, and the weight; [1, 2], of which DataParallel makes [devices, 2]."""
        with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None):
            loss = self.task.compute_loss(self.model, batch)
        weight = torch.as_tensor(self.task.weigh(batch), dtype=torch.float32, device=loss.device)
        return torch.stack([loss.float() * weight, weight])[None]


class CollaborativeTrainer(Trainer):
    """Trainer that computes gradients for hivemind's optimizer, on samples in this peer's own order."""

    def __init__(
        self,
        model: torch.nn.Module,
        args: TrainingArguments,
        samples: Dataset,
        optimizer: torch.optim.Optimizer,
        task: Task,
        sampler: PeerSampler,
        loss_meter: LossMeter,
        num_devices: int | None = None,
        **options: Any,
    ):
        dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else None
        # The Trainer requires a schedule. This one changes nothing: the real one counts global steps in the optimizer.
        no_schedule = MultiplicativeLR(optimizer, lambda step: 1.0)
        optimizers, module = (optimizer, no_schedule), TaskLoss(task, model, dtype)
        if num_devices is not None:
            args._n_gpu = min(args.n_gpu, num_devices)  # noqa: SLF001  the batch size of the loader counts these
        super().__init__(module, args, task.collate, samples, optimizers=optimizers, **options)
        self.sampler, self.loss_meter, self.task, self.mean_weight = sampler, loss_meter, task, 1.0
        self.micro_batches, self._scale = MicroBatches(model, optimizer, args.train_batch_size), 1.0
        self.remove_callback(PrinterCallback)  # prints to stdout what CollaborativeCallback logs

    def _wrap_model(self, model, training: bool = True, dataloader=None):
        if self.args.n_gpu > 1 and not isinstance(model, torch.nn.DataParallel):  # transformers takes all visible GPUs
            return torch.nn.DataParallel(model, device_ids=list(range(self.args.n_gpu)))
        return super()._wrap_model(model, training, dataloader)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> PeerSampler:
        return self.sampler

    def compute_loss(self, model, inputs, return_outputs: bool = False, **kwargs):
        if isinstance(model, torch.nn.DataParallel) and isinstance(inputs, Mapping):
            inputs = {**inputs}  # DataParallel splits a dict, but not a BatchEncoding
        weighted, weight = model(inputs).view(-1, 2).sum(dim=0)  # over the devices
        loss = weighted / weight * (self.task.weigh(inputs) / self.mean_weight)
        self.loss_meter.add(loss * self._scale * self.micro_batches.num_parts)
        return loss * self._scale

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        def backward(part: Any, share: float) -> torch.Tensor:
            weights = [self.task.weigh(one) for one in split(inputs, round(1 / share))]
            self._scale = self.task.weigh(inputs) / sum(weights)  # 1 for tokens, 1/2 where each half weighs the same
            return super(CollaborativeTrainer, self).training_step(model, part, num_items_in_batch)

        if (loss := self.micro_batches.compute(inputs, backward)) is not None:
            return loss
        mean = self.mean_weight - self.task.weigh(inputs) / self.current_gradient_accumulation_steps
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if mean > 0:  # else, none is left
            torch._foreach_mul_(gradients, float(self.mean_weight / mean))
            self.mean_weight = mean
        return torch.zeros((), device=self.args.device)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        """Add up the weights of the micro-batches of a local step: its loss is a mean over all their tokens.

        transformers' method, and the next one, refuse a batch that is a tensor; what they count is not used here.
        """
        self.mean_weight = sum(self.task.weigh(batch) for batch in batch_samples) / max(1, len(batch_samples))

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def _get_grad_norm(self, model, grad_norm: float | None = None) -> float | None:
        """Skip the Trainer's norm, which it computes for the log alone."""
        return grad_norm


def choose_devices(args: LocalOptions, has_adapters: bool = False) -> tuple[torch.device, int]:
    """Return the device to compute on, and the number of devices: with CUDA the first GPUs that are like GPU 0.

    A display card beside a GPU would end the trainer or slow it down. With adapters it is one: DataParallel would copy
    the base to the others for each micro-batch, 16 GB for 8 billion parameters.

    :raises UserError: if the device does not support the requested precision
    """
    autocast_dtype(args)
    device = find_device(args.use_cpu)
    if device.type != "cuda":
        return device, 1
    numbers = range(torch.cuda.device_count())
    kinds = [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in numbers]
    page = "see docs/gpus.md#several-gpus-in-one-machine"
    number = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))
    if number < len(kinds):
        names = ", ".join(f"GPU {i} ({name})" for i, (name, _) in enumerate(kinds) if i >= number)
        logger.warning(f"Not used beside {kinds[0][0]}: {names}. Start another trainer there, {page}")
    if has_adapters and number > 1:
        logger.warning(f"With --lora_rank a trainer uses one GPU: start one for each of the {number}, {page}")
        number = 1
    return device, number


def autocast_dtype(args: LocalOptions, device: torch.device | None = None) -> torch.dtype | None:
    """Return the dtype of mixed precision: the requested one, or on a GPU bf16 if supported and fp16 if not; or None.

    :param device: of the model; default: the first accelerator
    :raises UserError: if the device does not support the requested precision
    """
    device = find_device(args.use_cpu) if device is None else device
    has_gpu = device.type != "cpu"
    if args.fp16 and not has_gpu:
        raise UserError("--fp16 needs a GPU, and none is in use; drop the flag (transformers silently ignores it)")
    has_bf16 = has_gpu and supports_bf16(device)
    if args.bf16 and has_gpu and not has_bf16:
        name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
        raise UserError(f"--bf16: {name} has no bfloat16; pass --fp16 or no precision flag")
    if args.fp32 or not (has_gpu or args.bf16):
        return None
    return torch.bfloat16 if args.bf16 or (has_bf16 and not args.fp16) else torch.float16


def build_training_arguments(args: LocalOptions, peer_id: str) -> TrainingArguments:
    """Build transformers' arguments, without schedule, optimizer and clipping: they belong to the global step."""
    device, _ = choose_devices(args)
    dtype = autocast_dtype(args)
    return TrainingArguments(
        **{name: getattr(args, name) for name in _HANDED_ON},
        max_steps=_ENDLESS,
        max_grad_norm=0.0,  # the average is clipped instead, see StepThread._update
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        accelerator_config={"non_blocking": device.type == "cuda"},  # pinned; else each micro-batch waits for the GPU
        dataloader_drop_last=True,  # each local step reports the same number of samples
        remove_unused_columns=False,  # the collator needs special_tokens_mask
        seed=derive_seed(peer_id, args.seed) % 2**32,  # of masks and dropout; numpy takes 32 bits
        ignore_data_skip=True,  # PeerSampler continues its order after a restart
        logging_nan_inf_filter=False,  # the filter would hide a NaN or Inf loss
        save_strategy="no",  # CollaborativeCallback saves the training state, as run_custom_trainer.py does
        disable_tqdm=True,
        report_to="none",
    )
