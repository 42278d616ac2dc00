"""One download of the training state: find the donors, ask them in turn, receive the state of one.

Any peer can offer a state: the time per donor, the number of bytes and the cost of deserializing them are bounded.
"""

import asyncio
import math
import os
import random
import time
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.comparison import agrees
from peerstep.history import MAX_STEP, Marks, different_marks, read_marks
from peerstep.records import signer_of
from peerstep.wire import TensorAssembler

if TYPE_CHECKING:
    from peerstep.state import TrainingStateAverager

logger = get_logger(__name__)

DHT_TIMEOUT = 30.0  # seconds for reading the offers
State = tuple[str, dict, list[torch.Tensor]]  # a donor's peer ID, metadata and tensors


class StateLoadError(ValueError):
    """Raised if an offered state cannot be used."""


class OldStateError(StateLoadError):
    """Raised if a state is older than required."""


class DoubtfulStepError(StateLoadError):
    """Raised if a state is of a later step than the run is known to be at."""


@dataclass
class StateDownload:
    """Asks donors in turn until one has delivered its state.

    Order: donors with a credible step first, highest step first. The other donors follow only if none of these has
    sent metadata with a credible step. A step is credible up to EPOCH_SLACK above `credible_epoch` (progress reports
    lag), plus one per second since the query: no run takes more than one step per second. A state that most of up to
    NUM_COMPARED other donors contradict is used only if no donor has a better one.

    Time: all donors are dialed in advance, MAX_DIALS at a time. While other reachable donors are left, a donor may be
    silent for a quarter of the remaining time, and is abandoned once it would need, at its mean rate, more than three
    quarters of the time that was left when it began.
    """

    averager: "TrainingStateAverager"
    min_epoch: int  # oldest acceptable step
    credible_epoch: int | None  # newest step that the run is known to be at; None if unknown
    timeout: float  # seconds
    marks: Marks = ()  # of the history that the state must be of

    MAX_ATTEMPTS = 3  # a newcomer that gives up too early would start a second run
    MAX_DIALS = 64
    NUM_COMPARED = 7  # other donors that are asked for some elements of a state
    COMPARE_TIMEOUT = 10.0  # seconds
    EPOCH_SLACK = 2
    GRACE_SECONDS = 10.0  # before a donor's rate is judged

    def __post_init__(self):
        self.started = time.monotonic()
        self.deadline = self.started + self.timeout
        # With a timeout of 600 s, 1000 unreachable donors take at most 320 s. Dialing through a relay takes 6 to 18 s.
        self.dial_timeout = min(20.0, max(3.0, self.timeout / 20))
        self._dials: dict[PeerID, asyncio.Task] = {}
        self._queue: deque[PeerID] = deque()  # donors that were not asked yet
        self._doubted: list[PeerID] = []
        self._contradicted: State | None = None
        self._told_credible_step = False
        self._may_retry = False

    async def run(self) -> State | None:
        """Return a donor's peer ID, metadata and tensors."""
        for attempt in range(self.MAX_ATTEMPTS):
            await asyncio.sleep(attempt)
            self._may_retry = False
            state = await self._ask_all()
            if state is not None or not self._may_retry:
                break
        if state is None and self._contradicted is not None:
            state = self._contradicted
            logger.warning(
                f"Using the state of {state[0]} although other peers have another: nobody offers a better one"
            )
        return state

    async def _ask_all(self) -> State | None:
        """Ask each donor once. Sets `_may_retry` after a failure that may be temporary, such as a lost connection."""
        offers = await self._find_offers()
        likely, unlikely = rank_donors(offers, self.max_epoch)
        self._doubted, self._told_credible_step, slots = [], False, asyncio.Semaphore(self.MAX_DIALS)
        self._dials = {donor: asyncio.create_task(self._dial(donor, slots)) for donor in (*likely, *unlikely)}
        try:
            state = await self._ask_in_turn(likely, believe_all=False)
            if state is None and not self._told_credible_step:
                state = await self._ask_in_turn((*self._doubted, *unlikely), believe_all=True)
                if state is not None:
                    logger.warning(
                        f"No peer offers a state of step #{self.credible_epoch}, the current step "
                        "of the run: using the state of another step"
                    )
            return state
        finally:
            for dial in self._dials.values():
                dial.cancel()
            await asyncio.gather(*self._dials.values(), return_exceptions=True)

    async def _ask_in_turn(self, donors: Iterable[PeerID], believe_all: bool) -> State | None:
        self._queue = deque(donor for donor in donors if donor != self.averager.peer_id)
        while self._queue and time.monotonic() < self.deadline:
            if (state := await self._ask(self._queue.popleft(), believe_all)) is not None:
                return state
        return None

    @property
    def max_epoch(self) -> float:
        """Newest step that is credible at this time; it grows by one per second."""
        if self.credible_epoch is None:
            return math.inf
        return self.credible_epoch + self.EPOCH_SLACK + time.monotonic() - self.started

    async def _find_offers(self) -> object:
        key = f"{self.averager.prefix}.all_averagers"
        offers = self.averager.dht.get(key, latest=True, return_future=True)
        try:
            async with asyncio.timeout(DHT_TIMEOUT):
                found = await offers
        except TimeoutError:
            logger.warning(f"The DHT did not return the peers that offer a state within {DHT_TIMEOUT:.0f} seconds")
            self._may_retry = True
            return None
        return found.value if found is not None else None

    async def _dial(self, donor: PeerID, slots: asyncio.Semaphore) -> Exception | None:
        """Connect to a donor. Return the error, if there is one."""
        async with slots:
            try:
                async with asyncio.timeout(self.dial_timeout):
                    await self.averager._p2p._client.connect(donor, [])
            except Exception as error:
                return error

    async def _ask(self, donor: PeerID, believe_all: bool) -> State | None:
        """Request and check the state of a donor, if the donor is reachable; None if it has failed."""
        try:
            if (error := await self._dials[donor]) is not None:
                logger.warning(f"Could not reach {donor}, which offers a state")
                self._may_retry |= not isinstance(error, TimeoutError)
                return None
            logger.info(f"Downloading the state from {donor}")
            metadata, tensors = await self._receive(donor, believe_all)
            self.averager.check_state(metadata, tensors)
            self.averager.check_moments(tensors)
            state = str(donor), metadata, tensors
            if await self._is_contradicted(donor, tensors):
                logger.warning(f"Postponed the state that {donor} offers: other peers have another")
                self._contradicted = self._contradicted or state
                return None
            return state
        except DoubtfulStepError as error:
            logger.warning(f"Postponed the state that {donor} offers: {error}")
            self._doubted.append(donor)
        except OldStateError as error:
            logger.info(f"Not using the state that {donor} offers: {error}")
        except ValueError as error:
            logger.warning(f"Refused the state that {donor} offers: {error}")
        except Exception as error:
            logger.warning(f"Could not download the state from {donor}: {error!r}")
            self._may_retry |= not isinstance(error, TimeoutError)
        return None

    async def _is_contradicted(self, donor: PeerID, tensors: list[torch.Tensor]) -> bool:
        """Whether most of some other donors have another state, by elements that the donor could not know of."""
        reached = (peer for peer, dial in self._dials.items() if dial.done() and dial.result() is None)
        others = [peer for peer in reached if peer not in (donor, self.averager.peer_id)]
        chosen = random.sample(others, min(self.NUM_COMPARED, len(others)))
        answers = await asyncio.gather(*(self._compare(peer, tensors) for peer in chosen))
        return answers.count(False) > answers.count(True)

    async def _compare(self, peer: PeerID, tensors: list[torch.Tensor]) -> bool | None:
        """Whether a peer has about the same state as a donor; None if it does not say."""
        averager, seed = self.averager, os.urandom(8)
        try:
            stub = averager.get_stub(averager._p2p, peer, namespace=averager.prefix)
            async with asyncio.timeout(self.COMPARE_TIMEOUT):
                answer = await stub.rpc_compare_state(averaging_pb2.DownloadData(metadata=seed))
            return agrees(averager.groups(tensors), seed, answer)
        except Exception as error:
            logger.debug(f"{peer} does not say whether its state is the same: {error!r}")
            return None

    async def _receive(self, donor: PeerID, believe_all: bool) -> tuple[dict, list[torch.Tensor]]:
        """Receive the state of a donor; ValueError if it is not usable or not the expected one."""
        averager = self.averager
        stub = averager.get_stub(averager._p2p, donor, namespace=averager.prefix)
        async with asyncio.timeout(self._max_silence()):
            stream = await stub.rpc_download_state(averaging_pb2.DownloadRequest())
        async with aclosing(stream):
            async with asyncio.timeout(self._max_silence()):
                message = await anext(stream, None)
            if message is None:
                raise ConnectionError("it offers no state any more, or serves too many peers")
            metadata = self._read_metadata(message.metadata, believe_all)
            assembler, began = TensorAssembler(averager.expected_tensors(metadata)), time.monotonic()
            while True:
                assembler.add(message.tensor_part)
                if assembler.is_complete:
                    averager.unpack_state(assembler.tensors)
                    return metadata, assembler.tensors
                self._check_pace(began, assembler.fraction)
                async with asyncio.timeout(self._max_silence()):
                    message = await anext(stream, None)
                if message is None:
                    raise ConnectionError(
                        f"the stream ended after {len(assembler.tensors)} of {len(assembler.specs)} tensors"
                    )

    def _read_metadata(self, serialized: bytes, believe_all: bool) -> dict:
        if len(serialized) > self.averager.max_metadata_bytes:
            raise StateLoadError(f"its metadata is too large ({len(serialized)} bytes)")
        try:
            metadata = self.averager.serializer.loads(serialized)
        except Exception:
            raise StateLoadError("its metadata cannot be read") from None
        check_epoch(metadata, self.min_epoch)
        if different_marks(self.marks, read_marks(metadata)):
            raise StateLoadError("it is of another history of the run")
        if metadata["epoch"] <= self.max_epoch:
            self._told_credible_step = True
        elif not believe_all:
            raise DoubtfulStepError(
                f"it is of step #{metadata['epoch']}, but the run is at step #{self.credible_epoch}"
            )
        return metadata

    def _others_are_left(self) -> bool:
        dials = (self._dials[donor] for donor in self._queue)
        return any(dial.done() and dial.result() is None for dial in dials)

    def _max_silence(self) -> float:
        remaining = max(0.0, self.deadline - time.monotonic())
        return min(self.averager.donor_timeout, remaining / 4 if self._others_are_left() else remaining)

    def _check_pace(self, began: float, fraction: float) -> None:
        """Raise ConnectionError if a donor cannot deliver in time and another reachable donor is left."""
        elapsed, available = time.monotonic() - began, self.deadline - began
        is_too_slow = elapsed > min(self.GRACE_SECONDS, available / 10) and elapsed > fraction * 0.75 * available
        if is_too_slow and self._others_are_left():
            raise ConnectionError(f"too slow: received {fraction:.1%} in {elapsed:.0f} seconds; asking another donor")


def rank_donors(offers: object, max_epoch: float) -> tuple[list[PeerID], list[PeerID]]:
    """Sort donors by the priority of their offer, which is their step: highest first, ties at random.

    :returns: the donors with a credible step, and the other donors; malformed offers are skipped
    """
    likely, unlikely = {}, {}
    for subkey, offer in offers.items() if isinstance(offers, dict) else ():
        priority = offer.value if isinstance(offer, ValueWithExpiration) else None
        if isinstance(priority, int | float) and 0 <= priority <= MAX_STEP:
            donors = likely if priority <= max_epoch else unlikely
            with suppress(ValueError):
                donors[signer_of(subkey)] = (priority, random.random())
    return sorted(likely, key=likely.get, reverse=True), sorted(unlikely, key=unlikely.get, reverse=True)


def check_epoch(metadata: object, min_epoch: int = 0) -> None:
    """Check the step in the metadata of a state; OldStateError if it is before `min_epoch`."""
    epoch = metadata.get("epoch") if isinstance(metadata, dict) else None
    if type(epoch) is not int or not 0 <= epoch <= MAX_STEP:
        raise StateLoadError("it has no step number")
    if epoch < min_epoch:
        raise OldStateError(f"it is of step #{epoch}, no later than #{min_epoch - 1}")
