"""A plain PyTorch loop of a trainer."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import torch
from accelerate.utils import send_to_device
from hivemind.utils import get_logger
from torch.utils.data import DataLoader, Dataset

from cotrain.common.seeds import derive_seed
from cotrain.options import LocalOptions
from cotrain.training.device_errors import MicroBatches
from cotrain.training.hf_trainer import autocast_dtype
from cotrain.training.session import TrainingSession

logger = get_logger(__name__)


class _Ended(BaseException):
    """Leaves the block of `open_loop`."""


class TrainingLoop:
    """What a loop needs of the run that it has joined.

    :ivar model: trained in place, on `device`
    :ivar is_running: False after the last step of the run, or after Ctrl-C
    """

    def __init__(self, session: TrainingSession, args: LocalOptions, device: torch.device):
        self.session, self.model, self.args, self.device = session, session.model, args, device
        self.is_running, self._num_losses, self._dtype = True, 0, autocast_dtype(args, device)
        self._weights: list[float | torch.Tensor] = []  # of the micro-batches of this local step, or their parts
        self.scaler = torch.amp.GradScaler(device.type, enabled=self._dtype == torch.float16)
        self.micro_batches = MicroBatches(self.model, session.optimizer, args.per_device_train_batch_size)

    @property
    def global_step(self) -> int:
        """Newest global step that this peer has reached; 0 before the first one of the run."""
        return self.session.optimizer.local_epoch

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[torch.nn.Module]:
        """Yield the model for an evaluation, with the parameters of `global_step`. The next step waits meanwhile."""
        with self.session.optimizer.saved_state(), self.session.optimizer.tracker.pause_updates(), torch.no_grad():
            yield self.model.eval()
        self.model.train()

    def autocast(self) -> torch.autocast:
        """Return the context of mixed precision for the model and the loss, as --fp16, --bf16 and --fp32 choose it."""
        return torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype is not None)

    def batches(self, samples: Dataset, **options: Any) -> Iterator[Any]:
        """Yield batches on `device` while the run lasts, pass after pass, in an order that differs between peers.

        :param options: of torch's DataLoader, such as `num_workers` and `collate_fn`
        """
        size = self.args.per_device_train_batch_size
        sampler = self.session.open_sampler(samples, size)
        loader = DataLoader(samples, size, sampler=sampler, pin_memory=self.device.type == "cuda", **options)
        for batch in chain.from_iterable(repeat(loader)):
            # On MPS a copy that does not block may read memory that is freed: random tokens (pytorch #189690).
            yield send_to_device(batch, self.device, non_blocking=self.device.type == "cuda")
            if not self.is_running:
                return

    def train_on(
        self, batch: Any, compute_loss: Callable[[Any], torch.Tensor], weigh: Callable[[Any], Any] = lambda part: 1.0
    ) -> bool:
        """Compute the loss of a micro-batch in `autocast`, then do what `step` does.

        A micro-batch for which a GPU has no memory ends no training, see MicroBatches.

        :param compute_loss: returns the mean over the micro-batch, or over a part of it
        :param weigh: returns the weight of that mean, such as the number of its tokens
        """

        def backward(part: Any, share: float) -> torch.Tensor:
            with self.autocast():
                loss = compute_loss(part)
            self._backward(loss, weigh(part) * share)
            return loss.detach() * share

        if not self.is_running:
            raise _Ended
        number = len(self._weights)
        if (loss := self.micro_batches.compute(batch, backward)) is None:
            del self._weights[number:]
        return self._end_micro_batch(loss)

    def step(self, loss: torch.Tensor, weight: float | torch.Tensor = 1.0) -> bool:
        """Compute gradients, and after --gradient_accumulation_steps losses take a local step.

        :param loss: mean over a micro-batch; a detached one if the caller has called `backward`
        :param weight: of that mean among those of a local step, such as the number of its tokens
        :returns: `is_running`. If it is False, the next call leaves the block
        """
        if not self.is_running:
            raise _Ended
        self._backward(loss, weight)
        return self._end_micro_batch(loss)

    def _backward(self, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        relative = weight / (self._weights or [weight])[0]  # to the first weight: the sum is not known yet
        if loss.requires_grad:
            self.scaler.scale(loss * relative / self.args.gradient_accumulation_steps).backward()
        self._weights.append(weight)

    def _end_micro_batch(self, loss: torch.Tensor | None) -> bool:
        session, num_losses = self.session, self.args.gradient_accumulation_steps
        if loss is not None:
            session.loss_meter.add(loss)
        self._num_losses += 1
        number, is_incomplete = divmod(self._num_losses, num_losses)
        if is_incomplete:
            return True
        mean = float(sum(self._weights) / (num_losses * self._weights[0])) if self._weights else 1.0
        self._weights = []
        for parameter in self.model.parameters() if mean != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.div_(mean)
        # Accumulates the gradients. Once all peers together have target_batch_size samples, the optimizer averages
        # the gradients and takes the global step, for which it clips their average to --max_grad_norm.
        self.scaler.step(session.optimizer)
        self.scaler.update()
        session.optimizer.zero_grad()
        if loss is not None and (number == 1 or number % self.args.logging_steps == 0):
            logger.info(f"Local step {number}: loss = {loss.item():.5f}")
        self.is_running = session.after_local_step()
        if self.is_running and number % self.args.save_steps == 0:
            session.recovery.save_checkpoint()
        return self.is_running


@contextlib.contextmanager
def open_loop(session: TrainingSession, args: LocalOptions, device: torch.device) -> Iterator[TrainingLoop]:
    """Resume from a checkpoint and join the other peers; after the block, save a checkpoint and leave."""
    loop = TrainingLoop(session, args, device)
    session.join()  # downloads the state of peers that are at a later step
    torch.manual_seed(derive_seed(session.peer.dht.peer_id, args.seed))  # masks and dropout differ between peers
    with contextlib.suppress(_Ended):
        yield loop
    session.recovery.save_checkpoint()
    session.leave()
