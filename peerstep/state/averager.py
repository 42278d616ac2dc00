"""Training state of a peer: apply updates, offer the state to other peers, download and restore a state."""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import torch
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim import state_averager
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger
from hivemind.utils.streaming import split_for_streaming
from torch.optim.lr_scheduler import LambdaLR

from peerstep.peer.averager_process import SafeAverager
from peerstep.reports.marks import Marks
from peerstep.reports.records import store_record
from peerstep.state.digest import Digest, fold
from peerstep.state.download import StateDownload, describe
from peerstep.state.layout import StateLayout, read_position
from peerstep.state.membership import Membership, shared
from peerstep.state.messages import StoredMessages

logger = get_logger(__name__)

OFFER_MARGIN = 10.0  # seconds that an offer outlives the time of its renewal


def set_schedule(scheduler: LambdaLR, step: int) -> None:
    """Set a schedule to global step `step`, forwards or backwards, at constant cost.

    One `scheduler.step()` per global step, with the same result, would take hours for step 2^31 - 1.
    """
    learning_rates = [base * scale(step) for base, scale in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, learning_rate in zip(scheduler.optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate
    scheduler.last_epoch, scheduler._step_count, scheduler._last_lr = step, step + 1, learning_rates


async def _parse_all(messages: Iterable[bytes]) -> AsyncIterator[averaging_pb2.DownloadData]:
    for message in messages:
        yield averaging_pb2.DownloadData.FromString(message)


class TrainingStateAverager(SafeAverager, state_averager.TrainingStateAverager):
    """Holds the (offloaded) optimizer, offers its training state, and downloads the state of other peers.

    It averages nothing. The class name is part of the protocol: hivemind addresses the averager of another peer by
    class name (hivemind/p2p/servicer.py).

    `local_epoch` is the global step of this peer. Offers and saved states carry `applied_step`, the step whose update
    the parameters have. It lags while an update runs in the background.

    Only `apply_update`, `restore` and `sync_with_main_parameters` change the state, under `lock_optimizer` and
    `lock_averaged_tensors`: no reader sees a partial change.

    :param public_key: the subkey of this peer's records, from `build_validators`: an offer speaks for its signer
    :param download_timeout, donor_timeout: seconds for a whole download, and that a donor may be silent
    :param credible_step: returns the newest global step that the run is known to be at; None accepts any step. Called
      at the start of each download, see StateDownload. If all donors claim a later step, the state of one is accepted
      with a warning: there is no alternative.
    :param folder: on a disk, for the copies that other peers download; default: that for temporary files
    :param membership: has step, applied step and marks; default: those of a peer that does not train
    """

    # Bounds on the downloads of other peers, since a reader that has stalled keeps a copy of the state on the disk
    MAX_UPLOADS, MAX_UPLOADS_OF_ALL = 2, 16  # at the same time, of a peer and of all
    LEAST_RATE, READER_GRACE = 25_000.0, 60.0  # bytes per second that a reader must take, after a grace period
    BUSY_RATE = 100_000.0  # the same while more than half of the places are taken
    KEEPALIVE_SECONDS, MAX_COPY_SECONDS = 10.0, 600.0  # of a reader that waits for a copy
    # A new copy is made in COPY_SHARE of the time, and at any time if the one before took less than FREE_COPY_SECONDS.
    COPY_SHARE, FREE_COPY_SECONDS = 0.05, 0.25
    # Digests are computed in DIGEST_SHARE of the time of one core. MAX_ASKERS wait for one each, this long.
    DIGEST_SHARE, MAX_TURN_SECONDS, MAX_ASKERS = 0.25, 25.0, 64
    COUNT_SECONDS = 1800.0  # for which the answers to each peer are counted

    local_epoch, applied_step, marks = map(shared, ("membership.step", "membership.applied", "membership.marks"))

    def __init__(
        self,
        *args,
        public_key: bytes,
        download_timeout: float = 600.0,
        donor_timeout: float = 60.0,
        credible_step: Callable[[], int | None] | None = None,
        folder: Path | None = None,
        membership: Membership | None = None,
        **kwargs,
    ):
        self.membership = membership or Membership()
        self.public_key, self.folder = public_key, folder
        self.download_timeout, self.donor_timeout = download_timeout, donor_timeout
        self.credible_step = credible_step
        self.must_agree = False  # whether a download without most trainers' consent is none: it is to be published
        self.newest_copy: StoredMessages | None = None  # see copy_state
        self._copy_lock, self._is_copy_outdated = threading.Lock(), False
        self._next_copy_at, self._num_restored = 0.0, 0  # time.monotonic
        self._downloads: set = set()  # tasks, in the averager's process
        self.uploads: Counter[PeerID] = Counter()  # in the averager's process
        self._turns: dict[PeerID, tuple] = {}  # of peers that wait for a digest, in the averager's process
        self._answered: Counter[PeerID] = Counter()  # digests by peer since `_counted_at`
        self._counted_at = self._next_digest_at = self._digest_seconds = 0.0
        super().__init__(*args, **kwargs)

    def _init_components(self, *args) -> tuple:
        components = super()._init_components(*args)
        self.layout = StateLayout(components[0])
        for parameter in self._averaged_parameters:  # zeros, which forked processes would keep
            parameter.grad = None
        return components

    # Changing the state

    def apply_update(
        self, step: int, gradients: Sequence[torch.Tensor], parameters: list[torch.Tensor] | None = None
    ) -> None:
        """Run the optimizer for global step `step`.

        The learning rate is that of `step - 1`, as in hivemind. May run in a background thread: readers wait until it
        has ended. If the optimizer raises, restore a state.

        :param parameters: averaged parameters of a group, to start from instead of this peer's parameters
        """
        with self._changing_to(step):
            if parameters is not None:
                torch._foreach_copy_(self.layout.parameters, parameters)
            for parameter, gradient in zip(self.layout.parameters, gradients, strict=True):
                parameter.grad = gradient
            self._set_schedule(step - 1)
            self.optimizer.step()

    def restore(self, metadata: dict, tensors: list[torch.Tensor]) -> None:
        """Replace the state by another one, possibly of an earlier step. The tensors are copied.

        :raises ValueError: if the new state does not fit; the current state is then unchanged
        """
        position = read_position(metadata)
        self.layout.check(metadata, tensors)
        with self._changing_to(position.step):
            self.layout.copy_from(tensors)
            self.local_epoch, self.marks = position.step, position.marks
            self.newest_copy, self._num_restored = None, self._num_restored + 1  # it may be of another history
        if self.offload_optimizer:
            self.copy_to_model()

    def sync_with_main_parameters(self, step: int) -> None:
        """Copy parameters that were loaded into the model to the optimizer, and set their step.

        The copy of an offloaded optimizer would overwrite them at the next step.
        """
        with self._changing_to(step):
            torch._foreach_copy_(self.layout.parameters, tuple(self.main_parameters))
            self.local_epoch = step

    @contextmanager
    def _changing_to(self, step: int) -> Iterator[None]:
        """Change the state to that of a step, while no other thread reads it."""
        with self.lock_optimizer, self.lock_averaged_tensors, torch.no_grad():
            self._is_copy_outdated = True
            if time.monotonic() >= self._next_copy_at:
                self.newest_copy = None
            yield
            self._set_schedule(step)
            self.applied_step = step

    def _set_schedule(self, step: int) -> None:
        if self.scheduler is not None:
            set_schedule(self.scheduler, max(0, step))

    def copy_to_model(self) -> None:
        """Copy the parameters of an offloaded optimizer to the model."""
        with self.lock_averaged_tensors:
            self._apply_optimizer_parameters_()

    # Offering the state

    def offer(self, priority: float) -> None:
        """Offer the state to joining peers, which ask the donor with the highest priority first."""
        self.state_sharing_priority = priority
        self.allow_state_sharing = True

    async def _declare_for_download_periodically(self) -> None:
        """Publish the offer, and its end if it is withdrawn. hivemind's are not signed: anyone may do so."""
        key, was_offered = f"{self.prefix}.all_averagers", False
        while True:
            if self.allow_state_sharing or was_offered:
                was_offered = self.allow_state_sharing
                offer = self.state_sharing_priority if was_offered else None
                store_record(self.dht, key, self.public_key, offer, self.declare_state_period + OFFER_MARGIN)
            self._state_updated.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.declare_state_period):
                    await self._state_updated.wait()

    @contextmanager
    def frozen_state(self) -> Iterator[tuple[dict, list[torch.Tensor]]]:
        """Yield the state, metadata and tensors, without a copy. It does not change while the context is open."""
        with self.lock_optimizer, self.lock_averaged_tensors:
            marks = [list(mark) for mark in self.marks]
            metadata = {"epoch": self.applied_step, "statistics": self.layout.names, "marks": marks}
            yield metadata, [tensor.detach().cpu() for tensor in self.layout.tensors()]

    def copy_state(self) -> StoredMessages:
        """Return the messages of a download, all of one step. Downloads share them.

        They are on the disk: with a model of 1 billion parameters and float16 they have 6 GB. hivemind sends the live
        tensors: a long download would mix two steps. Steps wait while the state is copied in memory, where it is
        twice until it is on the disk. New copies are made in COPY_SHARE of the time: downloads may get an older one.
        """
        with self._copy_lock:
            with self.frozen_state() as (metadata, tensors):
                began, history = time.monotonic(), self._num_restored
                if self.newest_copy is not None and (not self._is_copy_outdated or began < self._next_copy_at):
                    return self.newest_copy
                tensors = [tensor.clone() for tensor in tensors]
                self._is_copy_outdated = False
            copy = StoredMessages(self.to_messages(metadata, tensors), self.folder)
            ended = time.monotonic()
            pause = 0.0 if ended - began < self.FREE_COPY_SECONDS else (ended - began) / self.COPY_SHARE
            with self.lock_optimizer:
                if history == self._num_restored:
                    self.newest_copy, self._next_copy_at = copy, ended + pause
            return copy

    def to_messages(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> Iterator[bytes]:
        """Yield a state as the messages of a download.

        Second moments, which the optimizer names, are sent as their roots: most are below 6e-8, and would become 0 in
        float16. The error of the roots is 0.05 % or 3e-8.
        """
        packed, first = self.serializer.dumps(metadata), len(self.layout.parameters)
        for index, tensor in enumerate(tensors):
            role = TensorRole.OPTIMIZER if index >= first else TensorRole.PARAMETER
            info = CompressionInfo.from_tensor(tensor, index, role=role)
            tensor = tensor.sqrt() if index in self.layout.second_moments else tensor
            for part in split_for_streaming(self.state_compression.compress(tensor, info)):
                yield averaging_pb2.DownloadData(tensor_part=part, metadata=packed).SerializeToString()
                packed = b""

    def get_current_state(self) -> tuple[None, tuple, StoredMessages]:
        """Return the copy for hivemind, which moves tensors to shared memory, but not what is beside them.

        :raises OSError: if the disk is full
        """
        try:
            return None, (), self.copy_state()
        except OSError as error:
            raise OSError(f"A peer cannot download the state: no copy of it in {self.folder} ({error})") from None

    async def rpc_download_state(
        self, _request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Send the state. Empty messages keep a reader waiting while a copy is made."""
        reader = context.remote_id
        is_busy = self.uploads[reader] >= self.MAX_UPLOADS or self.uploads.total() >= self.MAX_UPLOADS_OF_ALL
        if is_busy or not self.allow_state_sharing:
            return
        self.uploads[reader] += 1
        copying = asyncio.ensure_future(self._get_current_state_from_host_process())
        try:
            async with asyncio.timeout(self.MAX_COPY_SECONDS):
                while not (await asyncio.wait([copying], timeout=self.KEEPALIVE_SECONDS))[0]:
                    yield averaging_pb2.DownloadData()
            async with asyncio.timeout(self.READER_GRACE) as limit:
                async for message in self._keep_stream_open(_parse_all(copying.result()[2])):
                    yield message
                    rate = self.BUSY_RATE if self.uploads.total() > self.MAX_UPLOADS_OF_ALL / 2 else self.LEAST_RATE
                    limit.reschedule(limit.when() + len(message.tensor_part.buffer) / rate)  # pyright: ignore[reportOptionalOperand]
        finally:
            copying.cancel()
            self.uploads -= Counter({reader: 1})

    async def rpc_compare_state(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """Answer with a digest of the state, with the asker's seed, or with nothing: if busy, or before an offer.

        Peers with the fewest answers go first: a few keys that ask again and again hold up no other. A trainer that
        offers no state now, since it lacks an update, answers.
        """
        reader, now = context.remote_id, time.monotonic()
        has_offered = self.allow_state_sharing or self.state_sharing_priority > 0
        if reader in self._turns or len(self._turns) >= self.MAX_ASKERS or not has_offered:
            return averaging_pb2.DownloadData()
        if now > self._counted_at + self.COUNT_SECONDS:
            self._counted_at, self._answered = now, Counter()
        turn = self._turns[reader] = self._answered[reader], now, reader
        try:
            async with asyncio.timeout(self.MAX_TURN_SECONDS):
                while time.monotonic() < self._next_digest_at or min(self._turns.values()) != turn:
                    await asyncio.sleep(0.05)
            began, self._next_digest_at = time.monotonic(), math.inf
            self._answered[reader] += 1
            try:
                return await asyncio.to_thread(self.compute_digest, request.metadata)
            finally:
                self._next_digest_at = began + self._digest_seconds / self.DIGEST_SHARE
        except TimeoutError:
            return averaging_pb2.DownloadData()
        finally:
            del self._turns[reader]

    def compute_digest(self, seed: bytes) -> averaging_pb2.DownloadData:
        """Return the digest of the current state; ValueError for a malformed seed."""
        began, step = time.thread_time(), math.ceil(self.state_sharing_priority)  # `applied_step` is another process's
        sums = fold(self.layout.groups(self.layout.tensors()), seed)
        self._digest_seconds = time.thread_time() - began
        return Digest(step, sums).pack()

    # Downloading a state

    def load_state_from_peers(self, **query) -> bool:
        """Download the newest state that a peer offers and that fits, and apply it; False if there is none.

        :param query: of `download_state`; default: a state of a later step than this peer's
        """
        downloaded = self.download_state(**{"min_step": self.local_epoch + 1, **query})
        if downloaded is None:
            return False
        donor, metadata, tensors = downloaded
        self.restore(metadata, tensors)
        logger.info(f"Loaded the state of step #{self.local_epoch} from {donor}")
        return True

    def download_state(
        self, min_step: int = 0, credible_step: int | None = None, marks: Marks = ()
    ) -> tuple[str, dict, list[torch.Tensor]] | None:
        """Ask donors in turn for a state of step `min_step` or later that fits.

        :param credible_step: newest step that the run is known to be at; default: as `__init__` says
        :param marks: of a trainer of the side whose state it must be
        :returns: the donor's peer ID, metadata and tensors, all checked; None without a state in `download_timeout`
        """
        if credible_step is None and self.credible_step is not None:
            credible_step = self.credible_step()
        future = MPFuture()
        query = [min_step, credible_step, self.download_timeout, marks, self.must_agree]
        self._outer_pipe.send(("_download_state", [future, *query], {}))
        try:
            return future.result(timeout=self.download_timeout + self.donor_timeout)
        except Exception as error:
            logger.warning(f"Could not download the state from peers: {describe(error)}")
            return None

    async def _download_state(self, future: MPFuture, *query) -> None:
        state = None
        self._downloads.add(asyncio.current_task())
        try:
            state = await StateDownload(self, self.layout, self.donor_timeout, *query).run()
        except Exception as error:
            logger.warning(f"The download of the state failed: {describe(error)}")
        finally:
            self._downloads.discard(asyncio.current_task())
            future.set_result(state)

    async def _shutdown(self, timeout: float | None) -> None:
        """Cancel downloads for which a thread of the main process may be waiting, then shut down."""
        for download in self._downloads:
            download.cancel()
        await asyncio.gather(*self._downloads, return_exceptions=True)
        await super()._shutdown(timeout)
