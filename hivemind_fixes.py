"""Where the workarounds for hivemind 1.1.12 live, each with its reason. Everything else uses hivemind as documented.

`Optimizer` here is hivemind's, made safe for a run of strangers:

- a gradient that is not finite is dropped, at its source, at the peer that averages it, and where it is applied
  (in the bare library one micro-batch of NaN on one peer makes the parameters of every peer NaN, for good);
- a downloaded state is applied whole or not at all, and only if its shapes, optimizer and values fit (the bare library
  copies it in positionally, learning rate and weight decay included, and retries for ever if that raises);
- a peer offers its state only once it has been trained, and says which step it is of;
- building it leaves the signal handlers of the process alone.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from functools import partial

import hivemind
import torch
from hivemind.averaging import allreduce
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.averaging.partition import BannedException, TensorPartReducer
from hivemind.compression import deserialize_torch_tensor
from hivemind.dht import DHT
from hivemind.optim import grad_averager, progress_tracker, state_averager
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_dht_time, get_logger, nested_flatten, nested_pack
from hivemind.utils.asyncio import aiter_with_timeout, as_aiter, azip
from hivemind.utils.streaming import combine_from_streaming
from hivemind.utils.timed_storage import ValueWithExpiration

logger = get_logger(__name__)

MAX_EPOCH = 2**31  # more steps than any run makes; a peer that claims more is lying


class FiniteTensorPartReducer(TensorPartReducer):
    """Averages what finite peers send: one that sends NaN or Inf is left out of the rest of the round."""

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        # The sum of a part is finite only if each element is (or if it overflows, which is no gradient either).
        if not (math.isfinite(weight) and weight >= 0 and tensor_part.sum().isfinite()):
            raise BannedException(f"sender {sender_index} sent values that are not finite")
        return await super().accumulate_part(sender_index, part_index, tensor_part, weight)


allreduce.TensorPartReducer = FiniteTensorPartReducer


class SafeAverager(DecentralizedAverager):
    """What both averagers have in common."""

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start the process. hivemind also ignores SIGINT from here on, in the process of the caller."""
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[torch.Tensor], group_info, group_id: bytes | None = None, **kwargs
    ):
        """One round of all-reduce, as in hivemind; an update that is not finite is not applied."""
        group_id = group_info.group_id if group_id is None else group_id
        runner = allreduce.AllReduceRunner(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_id,
            ordered_peer_ids=group_info.peer_ids,
            **kwargs,
        )
        self._running_groups[group_id].set_result(runner)
        if runner.modes[group_info.peer_ids.index(self.peer_id)] == allreduce.AveragingMode.AUX:
            async for _ in runner:
                raise ValueError("auxiliary peers should not receive averaged tensors")
            return
        num_refused = 0
        async for tensor, update in azip(as_aiter(*tensors), runner):
            if not update.sum().isfinite():
                num_refused += 1
                update = torch.nan_to_num(update, nan=0.0, posinf=0.0, neginf=0.0)
            tensor.add_(update, alpha=self._averaging_alpha)
            self.last_updated = get_dht_time()
            self._state_updated.set()
        if num_refused:
            logger.warning(f"The others' average of {num_refused} tensors is not finite: kept our own values there")


class GradientAverager(SafeAverager, grad_averager.GradientAverager):
    """Averages gradients; bounds the norm of what this peer contributes.

    :param max_grad_norm: bound on the norm of this peer's mean gradient, 0: none. transformers' Trainer would clip
      each micro-batch instead, which biases their mean.
    """

    def __init__(self, *args, max_grad_norm: float = 0.0, **kwargs):
        self.max_grad_norm = max_grad_norm
        super().__init__(*args, allow_state_sharing=False, **kwargs)  # the gradients of others are of no use to anyone

    @torch.no_grad()
    def load_accumulators_into_averager_(self):
        super().load_accumulators_into_averager_()
        if self.max_grad_norm > 0:
            with self.get_tensors() as gradients:
                norm = torch.nn.utils.get_total_norm(gradients)
                torch.nn.utils.clip_grads_with_norm_(_as_parameters(gradients), self.max_grad_norm, norm)


def _as_parameters(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that carry the given gradients, for torch's clipping, which looks for them in `.grad`."""
    carriers = [torch.empty_like(gradient) for gradient in gradients]
    for carrier, gradient in zip(carriers, gradients, strict=True):
        carrier.grad = gradient
    return carriers


class StateLoadError(Exception):
    """A state was offered, but could not be used."""


# hivemind addresses a peer's averager by the name of its class, hence the same name.
class TrainingStateAverager(SafeAverager, state_averager.TrainingStateAverager):
    """Averages, offers and downloads the training state.

    :param download_timeout: seconds that a download may take in all
    :param donor_timeout: seconds that a donor may be silent. It answers only after a round of averaging that it is in
    """

    def __init__(self, *args, download_timeout: float = 600.0, donor_timeout: float = 60.0, **kwargs):
        self.download_timeout, self.donor_timeout = download_timeout, donor_timeout
        super().__init__(*args, **kwargs)

    @property
    def applied_epoch(self) -> int:
        """The step whose update the parameters have. `local_epoch` is ahead while an update is in the background."""
        return self.scheduler._step_count - 1 if self.scheduler is not None else self.local_epoch

    def get_current_state(self):
        """What a peer gets that asks for our state. While an update is in the background, it is of the step before.

        Waiting for the update instead would block both: it waits for the averaging round that the other is to join.
        """
        metadata, tensors, infos = super().get_current_state()
        metadata["epoch"] = min(self.applied_epoch, self.local_epoch)
        return metadata, tensors, infos

    def load_state_from_peers(self, **_kwargs) -> bool:
        """Download the newest state that a peer offers and that fits, and apply it.

        :returns: whether there was one. If not, ours is as it was.
        """
        downloaded = self.download_state(min_epoch=self.local_epoch)
        if downloaded is None:
            return False
        donor, metadata, tensors = downloaded
        self.restore(metadata, tensors)
        logger.info(f"Loaded the state of step #{self.local_epoch} from {donor}")
        return True

    def download_state(self, min_epoch: int = 0) -> tuple[str, dict, list[torch.Tensor]] | None:
        """Ask the peers that offer their state, one after the other, for one of step `min_epoch` or later that fits.

        :returns: the donor's peer ID, metadata and tensors, all checked; None if there is none in `download_timeout`
        """
        limits = {
            "min_epoch": min_epoch,
            "max_bytes": 2 * sum(t.numel() * t.element_size() for t in self._expected_tensors()) + 2**20,
            "deadline": time.monotonic() + self.download_timeout,
        }
        future = MPFuture()
        self._outer_pipe.send(("_download_state", [], {"future": future, **limits}))
        try:
            return future.result(timeout=self.download_timeout + self.donor_timeout)
        except Exception as error:
            logger.warning(f"Could not download the state from peers: {error!r}")
            return None

    async def _download_state(self, future: MPFuture, min_epoch: int, max_bytes: int, deadline: float) -> None:
        """Runs in the averager process: try the donors, highest priority first."""
        result = None
        try:
            found = await self.dht.get(f"{self.prefix}.all_averagers", latest=True, return_future=True)
            for donor in _rank_donors(found.value if found is not None else None):
                if donor == self.peer_id or time.monotonic() > deadline:
                    continue
                try:
                    logger.info(f"Downloading the state from {donor}")
                    metadata, tensors = await self._download_from(donor, max_bytes, deadline)
                    self.check_state(metadata, tensors, min_epoch)
                    result = (str(donor), metadata, tensors)
                    break
                except StateLoadError as error:
                    logger.warning(f"Refused the state that {donor} offers: {error}")
                except Exception as error:
                    logger.warning(f"Could not download the state from {donor}: {error!r}")
        finally:
            future.set_result(result)

    async def _download_from(self, donor: PeerID, max_bytes: int, deadline: float):
        """Receive a donor's state; raises if it is silent for too long, sends too much, or ends too early."""
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        stream = await asyncio.wait_for(stub.rpc_download_state(averaging_pb2.DownloadRequest()), self.donor_timeout)
        metadata, tensors, parts, num_bytes = None, [], [], 0
        async for message in aiter_with_timeout(stream, timeout=self.donor_timeout):
            num_bytes += len(message.tensor_part.buffer) + len(message.metadata)
            if num_bytes > max_bytes:
                raise StateLoadError("it is larger than ours")
            if time.monotonic() > deadline:
                raise TimeoutError("it takes too long")
            if message.metadata:
                metadata = self.serializer.loads(message.metadata)
            if message.tensor_part.dtype and parts:  # the first part of a tensor has its dtype
                tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
                parts = []
            parts.append(message.tensor_part)
        if parts:
            tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
        if not isinstance(metadata, dict):
            raise StateLoadError("it has none to offer")
        return metadata, tensors

    def _optimized_parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _expected_tensors(self) -> list[torch.Tensor]:
        """Our own state in the order in which a donor sends it: parameters, then the optimizer's tensors."""
        statistics = state_averager.dump_optimizer_state(self.optimizer)[1]
        return [*self._parameters_and_extras(), *statistics]

    def _parameters_and_extras(self) -> list[torch.Tensor]:
        return [*self._optimized_parameters(), *self.extra_tensors]

    def check_state(self, metadata: dict, tensors: Sequence[torch.Tensor], min_epoch: int = 0) -> dict:
        """Raise StateLoadError unless a state has our shapes, our optimizer, finite values, and step >= min_epoch.

        :returns: its optimizer state, in the structure of ours
        """
        epoch = metadata.get("epoch")
        if type(epoch) is not int or not 0 <= epoch < MAX_EPOCH:
            raise StateLoadError("it has no step number")
        if epoch < min_epoch:
            raise StateLoadError(f"it is of step #{epoch}, before #{min_epoch}")
        own = self._parameters_and_extras()
        if [t.shape for t in tensors[: len(own)]] != [t.shape for t in own]:
            raise StateLoadError("its parameters have other shapes: another model, or cut off")
        if not all_finite(tensors[: len(own)]):
            raise StateLoadError("its parameters are not finite")
        return self._match_optimizer_state(metadata.get("optimizer_metadata"), tensors[len(own) :])

    def restore(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Go to a state, which may be an older one than ours.

        :raises StateLoadError: if it does not fit; ours is then as it was
        """
        optimizer_state = self.check_state(metadata, tensors)
        with torch.no_grad(), self.lock_averaged_tensors:
            self.optimizer.load_state_dict(optimizer_state)
            for own_tensor, tensor in zip(self._parameters_and_extras(), tensors, strict=False):
                own_tensor.copy_(tensor)
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()
        self.local_epoch = metadata["epoch"]
        self._update_scheduler()

    def _match_optimizer_state(self, metadata, tensors: Sequence[torch.Tensor]) -> dict:
        """The donor's optimizer statistics in the structure of our optimizer; its hyper-parameters stay ours."""
        own = self.optimizer.state_dict()
        own_values = list(nested_flatten(own))
        if not isinstance(metadata, list) or len(metadata) != len(own_values):
            raise StateLoadError("its optimizer is another one")
        values = []
        for entry, own_value in zip(metadata, own_values, strict=True):
            if not isinstance(entry, dict):
                raise StateLoadError("its optimizer state is malformed")
            if entry.get("type") == "tensor":
                index = entry.get("index")
                if type(index) is not int or not 0 <= index < len(tensors):
                    raise StateLoadError("its optimizer state was cut off")
                value = tensors[index]
            else:
                value = entry.get("value")
            values.append(value)
            _check_statistic(value, own_value)
        return {**nested_pack(values, own), "param_groups": own["param_groups"]}

    def snapshot(self) -> tuple[dict, list[torch.Tensor]]:
        """A copy of the state as it would be sent to a peer: metadata and tensors."""
        with torch.no_grad(), self.lock_averaged_tensors:
            optimizer_metadata, statistics = state_averager.dump_optimizer_state(self.optimizer)
            tensors = [*self._parameters_and_extras(), *statistics]
            copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        return {"epoch": min(self.applied_epoch, self.local_epoch), "optimizer_metadata": optimizer_metadata}, copies

    def sync_with_main_parameters(self, epoch: int) -> None:
        """Take over parameters that were loaded into the model from outside, and their step.

        An offloaded optimizer has its own copy of the weights, which would undo them at the next step.
        """
        with torch.no_grad(), self.lock_averaged_tensors:
            for main_parameter, parameter in zip(self.main_parameters, self._optimized_parameters(), strict=True):
                if main_parameter is not parameter:
                    parameter.copy_(main_parameter)
        self.local_epoch = epoch
        self._update_scheduler()


def _rank_donors(offers: object) -> list[PeerID]:
    """The peers that offer their state, highest priority (their step) first; malformed offers are left out."""
    priorities = {}
    for peer_id, offer in offers.items() if isinstance(offers, dict) else ():
        priority = offer.value if isinstance(offer, ValueWithExpiration) else None
        if isinstance(peer_id, bytes) and isinstance(priority, int | float) and 0 <= priority < MAX_EPOCH:
            priorities[PeerID(peer_id)] = (priority, random.random())
    return sorted(priorities, key=priorities.get, reverse=True)


def _check_statistic(value, own_value) -> None:
    """A donor's optimizer statistic must be of our shape and finite; scalars may be tensors or numbers."""
    if isinstance(own_value, torch.Tensor) and own_value.ndim > 0:
        if not isinstance(value, torch.Tensor) or value.shape != own_value.shape:
            raise StateLoadError("its optimizer statistics have other shapes")
        if not all_finite([value]):
            raise StateLoadError("its optimizer statistics are not finite")
    elif isinstance(value, torch.Tensor) and value.ndim > 0:
        raise StateLoadError("its optimizer statistics have other shapes")
    elif isinstance(value, torch.Tensor | float) and not math.isfinite(value):
        raise StateLoadError("its optimizer statistics are not finite")


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor has a NaN or an Inf. One fused norm, one synchronisation with the device."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating:
        return True
    return bool(torch.nn.utils.get_total_norm([t.float() for t in floating], norm_type=float("inf")).isfinite())


class ProgressTracker(progress_tracker.ProgressTracker):
    """hivemind's tracker, which believes any peer's claim to be ahead; here a claim that no state backs is ignored."""

    def __init__(self, *args, **kwargs):
        self._distrusted: dict[bytes, float] = {}  # subkey of a peer -> until when
        super().__init__(*args, **kwargs)

    def run(self) -> None:
        """hivemind leaves a task of its event loop pending, which asyncio complains about as an error at exit."""
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(asyncio.gather(self._progress_reporter(), self._progress_fetcher()))
        self.shutdown_complete.set()
        loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))

    def distrust_claims_above(self, epoch: int, seconds: float = 600.0) -> int:
        """Ignore peers that claim to be past `epoch`, for a while. Call it when no state backs them.

        :returns: the number of peers
        """
        found = self.dht.get(self.training_progress_key, latest=True, return_future=True).result(timeout=10)
        records = found.value if found is not None and isinstance(found.value, dict) else {}
        liars = [
            subkey
            for subkey, record in records.items()
            if isinstance(record.value, dict) and record.value.get("epoch", 0) > epoch
        ]
        until = get_dht_time() + seconds
        self._distrusted.update(dict.fromkeys(liars, until))
        return len(liars)

    def _parse_swarm_progress_data(self, metadata):
        now = get_dht_time()
        self._distrusted = {subkey: until for subkey, until in self._distrusted.items() if until > now}
        if isinstance(metadata, ValueWithExpiration):  # what hivemind passes at the start, where it finds no one then
            metadata = metadata.value
        if isinstance(metadata, dict):
            metadata = {
                subkey: record
                for subkey, record in metadata.items()
                if subkey not in self._distrusted and _is_plausible(record.value, now)
            }
        return super()._parse_swarm_progress_data(metadata)


def _is_plausible(progress: dict | None, now: float) -> bool:
    """Whether a peer's report can be counted: its schema was checked, its values were not."""
    if progress is None:
        return True
    return (
        progress["epoch"] < MAX_EPOCH
        and progress["samples_accumulated"] < 10**9
        and math.isfinite(progress["samples_per_second"])
        and progress["samples_per_second"] < 1e9
        and math.isfinite(progress["time"])
        and progress["time"] < now + 60
    )


class Optimizer(hivemind.Optimizer):
    """hivemind.Optimizer with the guards that the module's docstring lists.

    :param max_grad_norm: see GradientAverager
    :param private_key: signs this peer's progress reports; must be the key that the DHT's validator has
    """

    def __init__(self, *, dht: DHT, max_grad_norm: float, private_key, client_mode: bool, tracker_opts: dict,
                 grad_averager_opts: dict, state_averager_opts: dict, **kwargs):  # fmt: skip
        self._state_averager_opts = state_averager_opts
        self._private_key = private_key
        self.num_dropped_gradients = 0
        self.last_group_size = 0
        self.last_completed_step = 0  # the newest global step that this peer took part in, and
        self.last_contribution = 0  # the samples that it gave
        self._failed_loads = 0
        super().__init__(
            dht=dht,
            client_mode=client_mode,
            grad_averager_factory=partial(GradientAverager, max_grad_norm=max_grad_norm, **grad_averager_opts),
            tracker_opts=tracker_opts,
            **kwargs,
        )
        self.client_mode = client_mode  # hivemind leaves None here, and raises at the first step of a client

    def _make_progress_tracker(self, target_batch_size: int, **kwargs) -> ProgressTracker:
        return ProgressTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.dht.client_mode,
            status_loglevel=logging.DEBUG,
            private_key=self._private_key,
            start=True,
            **kwargs,
        )

    def _make_state_averager(self, **kwargs) -> TrainingStateAverager:
        return TrainingStateAverager(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            offload_optimizer=self.offload_optimizer,
            custom_gradients=self.offload_optimizer,
            status_loglevel=self.status_loglevel,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.dht.client_mode,
            auxiliary=self.auxiliary,
            allow_state_sharing=False,  # until there is a trained state to share, see share_state
            start=True,
            **self._state_averager_opts,
            **kwargs,
        )

    def finish_pending_update(self) -> None:
        """Wait for the update in the background, if there is one, and apply it to the model."""
        self.state_averager.step(wait_for_delayed_updates=True)

    def share_state(self) -> None:
        """Offer our state to peers that join, from now on. Call it once it has been trained or downloaded."""
        averager = self.state_averager
        if not averager.client_mode and not averager.allow_state_sharing:
            averager.state_sharing_priority = self.local_epoch
            averager.allow_state_sharing = True

    def _check_and_accumulate_gradients(self, batch_size: int, grad_scaler) -> bool:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not all_finite(gradients):
            self.num_dropped_gradients += 1
            if self.num_dropped_gradients == 1 or self.num_dropped_gradients % 100 == 0:
                logger.warning(f"Dropped a gradient that is not finite ({self.num_dropped_gradients} so far)")
            return False
        return super()._check_and_accumulate_gradients(batch_size, grad_scaler)

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control: StepControl | None):
        """Wait for the round of averaging. If it fails, the averager still has our own gradients, which it was given
        at the start; hivemind would take the accumulators instead, which hold those of the next step by now."""
        try:
            group_info = maybe_step_control.result(self.averaging_timeout)
            self.last_group_size = len(group_info)
            logger.info(f"Averaged gradients with {len(group_info)} peers")
        except BaseException as error:
            logger.warning(f"Averaging gradients failed with {error!r}. Proceeding with local gradients")
            if maybe_step_control is not None and not maybe_step_control.done():
                maybe_step_control.cancel()
        self._load_averaged_gradients_into_optimizer_()

    def _update_global_epoch(self, grad_scaler) -> None:
        self.last_contribution = self.grad_averager.local_samples_accumulated
        super()._update_global_epoch(grad_scaler)
        self.last_completed_step = self.local_epoch
        self.share_state()

    def load_state_from_peers(self, **_kwargs) -> bool:
        """Download the newest state from peers, if any offers one that fits.

        :returns: whether the state was loaded. If not, training goes on with ours.
        """
        if self.scheduled_grads is not None and not self.scheduled_grads.done():
            self._tag_along_with_zero_weight(self.scheduled_grads)
            self.scheduled_grads = None
        self.state_averager.step(wait_for_delayed_updates=True)
        with self.tracker.pause_updates():
            loaded = self.state_averager.load_state_from_peers()
            claimed = self.tracker.global_epoch
            if loaded and claimed - 1 <= self.local_epoch < claimed:
                logger.info(f"Catching up with collaboration step {claimed}")
                self.state_averager.local_epoch = claimed
            if self.local_epoch < claimed - 1:
                self._doubt(claimed)
            self.forget_progress()
            if loaded:
                self._failed_loads = 0
                self.share_state()
                if not self.state_averager.client_mode:
                    self.state_averager.state_sharing_priority = self.local_epoch
        return loaded

    def forget_progress(self) -> None:
        """Drop the gradients accumulated so far: they belong to other parameters than the ones we have now."""
        self.grad_averager.reset_accumulated_grads_()
        self.tracker.report_local_progress(local_epoch=self.local_epoch, samples_accumulated=0)

    def _doubt(self, claimed: int) -> None:
        """Somebody claims to be at a later step, but nobody offers its state."""
        self._failed_loads += 1
        if self._failed_loads >= 3:
            number = self.tracker.distrust_claims_above(self.local_epoch + 1)
            logger.warning(f"Ignoring {number} peers that claim step #{claimed}: no state of it is offered")
            self.tracker.global_progress.epoch = self.local_epoch
            self._failed_loads = 0
