"""One download of the training state: find the donors, ask them in turn, receive the state of one.

Any peer can offer a state: the time per donor, the number of bytes and the cost of deserializing them are bounded.
"""

import asyncio
import math
import os
import random
import time
from collections.abc import Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import torch
from hivemind.p2p import PeerID
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.base import SafeAverager
from peerstep.history import MAX_STEP, Marks, different_marks
from peerstep.records import signer_of
from peerstep.state_layout import OldStateError, StateLayout, StateLoadError, read_position
from peerstep.wire import TensorAssembler

logger = get_logger(__name__)

OFFERS_TIMEOUT = 30.0  # seconds for reading the offers
State = tuple[str, dict, list[torch.Tensor]]  # a donor's peer ID, metadata and tensors


class DoubtfulStepError(StateLoadError):
    """Raised if a state is of a later step than the run is known to be at."""


@dataclass
class StateDownload:
    """Asks donors in turn until one has delivered its state.

    Order: donors with a credible step first, highest step first. The other donors follow only if none of these has
    sent metadata with a credible step. A step is credible up to STEP_SLACK above `credible_step` (progress reports
    lag), plus one per second since the query: no run takes more than one step per second. A state that most of up to
    NUM_COMPARED other donors contradict is used only if no donor has a better one.

    Time: all donors are dialed in advance, MAX_DIALS at a time. While other reachable donors are left, a donor may be
    silent for a quarter of the remaining time, and is abandoned once it would need, at its mean rate, more than three
    quarters of the time that was left when it began.
    """

    averager: SafeAverager  # of this peer, through which the donors are asked
    layout: StateLayout
    donor_timeout: float  # seconds that a donor may be silent
    min_step: int  # oldest acceptable step
    credible_step: int | None  # newest step that the run is known to be at; None if unknown
    timeout: float  # seconds
    marks: Marks = ()  # of the history that the state must be of

    MAX_ATTEMPTS = 3  # a newcomer that gives up too early would start a second run
    MAX_DIALS = 64
    NUM_COMPARED = 7  # other donors that are asked for some elements of a state
    COMPARE_TIMEOUT = 10.0  # seconds
    STEP_SLACK = 2
    PACE_GRACE = 10.0  # seconds before a donor's rate is judged

    def __post_init__(self):
        self.started = time.monotonic()
        self.deadline = self.started + self.timeout
        # With a timeout of 600 s, 1000 unreachable donors take at most 320 s. Dialing through a relay takes 6 to 18 s.
        self.dial_timeout = min(20.0, max(3.0, self.timeout / 20))
        self._dials: dict[PeerID, asyncio.Task] = {}
        self._queue: list[PeerID] = []  # donors that are left, the next one last
        self._doubtful: list[PeerID] = []  # those of a step that is not credible
        self._contradicted: State | None = None
        self._told_credible_step = self._may_retry = self._believes_all = False

    async def run(self) -> State | None:
        """Return a donor's peer ID, metadata and tensors."""
        for attempt in range(self.MAX_ATTEMPTS):
            await asyncio.sleep(attempt)
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
        self._may_retry = self._told_credible_step = self._believes_all = False
        offers, slots = await self._find_offers(), asyncio.Semaphore(self.MAX_DIALS)
        self._queue, self._doubtful = rank_donors(offers, self.max_step, self.averager.peer_id)
        donors = (*self._queue, *self._doubtful)
        self._dials = {donor: asyncio.create_task(self._dial(donor, slots)) for donor in donors}
        try:
            while time.monotonic() < self.deadline:
                if not self._queue:
                    if self._told_credible_step or not self._doubtful:
                        return None
                    self._queue, self._doubtful, self._believes_all = self._doubtful, [], True
                if (state := await self._ask(self._queue.pop())) is not None:
                    return state
            return None
        finally:
            for dial in self._dials.values():
                dial.cancel()
            await asyncio.gather(*self._dials.values(), return_exceptions=True)

    @property
    def max_step(self) -> float:
        """Newest step that is credible at this time; it grows by one per second."""
        if self.credible_step is None:
            return math.inf
        return self.credible_step + self.STEP_SLACK + time.monotonic() - self.started

    async def _find_offers(self) -> object:
        key = f"{self.averager.prefix}.all_averagers"
        offers = self.averager.dht.get(key, latest=True, return_future=True)
        try:
            async with asyncio.timeout(OFFERS_TIMEOUT):
                found = await offers  # pyright: ignore[reportGeneralTypeIssues]
        except TimeoutError:
            logger.warning(f"The DHT did not return the peers that offer a state within {OFFERS_TIMEOUT:.0f} seconds")
            self._may_retry = True
            return None
        return found.value if found is not None else None

    async def _dial(self, donor: PeerID, slots: asyncio.Semaphore) -> Exception | None:
        """Connect to a donor. Return the error, if there is one."""
        async with slots:
            try:
                async with asyncio.timeout(self.dial_timeout):
                    await self.averager._p2p._client.connect(donor, [])  # pyright: ignore[reportAttributeAccessIssue]
            except Exception as error:
                return error

    async def _ask(self, donor: PeerID) -> State | None:
        """Request and check the state of a donor, if the donor is reachable; None if it has failed."""
        try:
            if (error := await self._dials[donor]) is not None:
                logger.warning(f"Could not reach {donor}, which offers a state")
                self._may_retry |= not isinstance(error, TimeoutError)
                return None
            logger.info(f"Downloading the state from {donor}")
            metadata, tensors = await self._receive(donor)
            self.layout.unpack(metadata, tensors)
            state = str(donor), metadata, tensors
            if await self._is_contradicted(donor, tensors):
                logger.warning(f"Postponed the state that {donor} offers: other peers have another")
                self._contradicted = self._contradicted or state
                return None
            if self._believes_all:
                logger.warning(
                    f"No peer offers a state of step #{self.credible_step}, the current step of the run: using the "
                    "state of another step"
                )
            return state
        except DoubtfulStepError as error:
            logger.warning(f"Postponed the state that {donor} offers: {error}")
            self._doubtful.append(donor)
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
        others = [peer for peer in self._reached(self._dials) if peer != donor]
        chosen = random.sample(others, min(self.NUM_COMPARED, len(others)))
        answers = await asyncio.gather(*(self._compare(peer, tensors) for peer in chosen))
        return answers.count(False) > answers.count(True)

    async def _compare(self, peer: PeerID, tensors: list[torch.Tensor]) -> bool | None:
        """Whether a peer has about the same state as a donor; None if it does not say."""
        seed = os.urandom(8)
        try:
            async with asyncio.timeout(self.COMPARE_TIMEOUT):
                answer = await self._stub(peer).rpc_compare_state(averaging_pb2.DownloadData(metadata=seed))
            return self.layout.agrees(tensors, seed, answer)
        except Exception as error:
            logger.debug(f"{peer} does not say whether its state is the same: {error!r}")
            return None

    def _stub(self, peer: PeerID) -> StubBase:
        return self.averager.get_stub(self.averager._p2p, peer, namespace=self.averager.prefix)

    async def _receive(self, donor: PeerID) -> tuple[dict, list[torch.Tensor]]:
        """Receive the state of a donor; ValueError if it is not usable or not the expected one."""
        async with asyncio.timeout(self._max_silence()):
            stream = await self._stub(donor).rpc_download_state(averaging_pb2.DownloadRequest())
        assembler, began = None, 0.0
        async with aclosing(stream):
            while True:
                async with asyncio.timeout(self._max_silence()):
                    message = await anext(stream, None)
                if message is None:
                    if assembler is None:
                        raise ConnectionError("it offers no state any more, or serves too many peers")
                    raise ConnectionError(
                        f"the stream ended after {len(assembler.tensors)} of {len(assembler.specs)} tensors"
                    )
                if assembler is None:
                    metadata = self._read_metadata(message.metadata)
                    assembler, began = TensorAssembler(self.layout.specs(metadata)), time.monotonic()
                assembler.add(message.tensor_part)
                if assembler.is_complete:
                    return metadata, assembler.tensors
                self._check_pace(began, assembler.fraction)

    def _read_metadata(self, serialized: bytes) -> dict:
        if len(serialized) > self.layout.max_metadata_bytes:
            raise StateLoadError(f"its metadata is too large ({len(serialized)} bytes)")
        try:
            metadata = self.averager.serializer.loads(serialized)
        except Exception:
            raise StateLoadError("its metadata cannot be read") from None
        position = read_position(metadata, self.min_step)
        if different_marks(self.marks, position.marks):
            raise StateLoadError("it is of another history of the run")
        if position.step <= self.max_step:
            self._told_credible_step = True
        elif not self._believes_all:
            raise DoubtfulStepError(f"it is of step #{position.step}, but the run is at step #{self.credible_step}")
        return metadata  # pyright: ignore[reportReturnType]

    def _reached(self, donors: Iterable[PeerID]) -> list[PeerID]:
        return [donor for donor in donors if self._dials[donor].done() and self._dials[donor].result() is None]

    def _max_silence(self) -> float:
        remaining = max(0.0, self.deadline - time.monotonic())
        return min(self.donor_timeout, remaining / 4 if self._reached(self._queue) else remaining)

    def _check_pace(self, began: float, fraction: float) -> None:
        """Raise ConnectionError if a donor cannot deliver in time and another reachable donor is left."""
        elapsed, available = time.monotonic() - began, self.deadline - began
        is_too_slow = elapsed > min(self.PACE_GRACE, available / 10) and elapsed > fraction * 0.75 * available
        if is_too_slow and self._reached(self._queue):
            raise ConnectionError(f"too slow: received {fraction:.1%} in {elapsed:.0f} seconds; asking another donor")


def rank_donors(offers: object, max_step: float, own_id: PeerID) -> tuple[list[PeerID], list[PeerID]]:
    """Sort donors by the priority of their offer, which is their step: highest last, ties at random.

    :returns: the donors with a credible step, and the other donors, without this peer and malformed offers
    """
    ranks = {}
    for subkey, offer in offers.items() if isinstance(offers, dict) else ():
        priority = offer.value if isinstance(offer, ValueWithExpiration) else None
        if isinstance(priority, int | float) and 0 <= priority <= MAX_STEP:
            with suppress(ValueError):
                ranks[signer_of(subkey)] = priority, random.random()
    ranks.pop(own_id, None)
    donors = sorted(ranks, key=lambda donor: ranks[donor])
    likely = [donor for donor in donors if ranks[donor][0] <= max_step]
    return likely, [donor for donor in donors if ranks[donor][0] > max_step]
