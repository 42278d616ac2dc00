"""One download of the training state: find the donors, ask them in turn, receive the state of one.

Any peer can offer a state: the time per donor, the number of bytes and the cost of deserializing them are bounded.
"""

import asyncio
import math
import os
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import torch
from hivemind.p2p import PeerID
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.peer.averager_process import SafeAverager
from peerstep.reports.marks import MAX_STEP, Marks, common_marks, is_forked
from peerstep.reports.progress_report import PeerProgress, read_progress
from peerstep.reports.records import signer_of
from peerstep.state.digest import SEED_BYTES, Digest, distances, fold, is_near
from peerstep.state.layout import OldStateError, StateLayout, StateLoadError, read_position
from peerstep.tensors.checks import TensorAssembler

logger = get_logger(__name__)

READ_TIMEOUT = 30.0  # seconds for reading the offers and the trainers' reports
MAX_AGE = 4  # steps that a donor's copy may have when its download begins, if the trainers have moved far meanwhile
State = tuple[str, dict, list[torch.Tensor]]  # a donor's peer ID, metadata and tensors


class DoubtfulStepError(StateLoadError):
    """Raised if a state is of a later step than the run is known to be at."""


@dataclass
class StateDownload:
    """Asks donors in turn until one has delivered a state that most trainers have, too.

    **Who speaks.** Members are the public peers that report progress as trainers, with or without an offer;
    without any, the donors that this peer has been told as initial peers; without these, all donors. They are asked
    first and only they vote, up to NUM_VOTERS others, by random sums whose signs are chosen after the download
    (state_digest.py). A state that most of them contradict is used only if no donor has a better one, and not if it
    `must_agree`: if another trainer reports, that needs a vote for it.

    **Order.** At random among those that claim the newest step that two trainers report, or a later one; then those of
    earlier steps. Donors whose claimed step is not credible follow only if none of these has sent metadata with a
    credible step. A step is credible up to STEP_SLACK above `credible_step` (progress reports lag), plus one per
    second since the query: no run takes more than one step per second.

    **Time.** All donors are dialed in advance, MAX_DIALS at a time. While other reachable donors are left, a donor may
    be silent for a quarter of the remaining time, and is abandoned once it would need, at its mean rate, more than
    three quarters of the time that was left when it began. Up to MAX_SLOW that need more than SLOW_SECONDS are put
    aside: they are asked again, the fastest first, if no other is left.
    """

    averager: SafeAverager  # of this peer, through which the donors are asked
    layout: StateLayout
    donor_timeout: float  # seconds that a donor may be silent
    min_step: int  # oldest acceptable step
    credible_step: int | None  # newest step that the run is known to be at; None: that of the trainers' reports
    timeout: float  # seconds
    marks: Marks = ()  # of a trainer of the side whose state it must be
    must_agree: bool = False  # whether only a state will do that most members have, too

    MAX_ATTEMPTS = 3  # a newcomer that gives up too early would start a second run
    MAX_DIALS = 64
    NUM_VOTERS = 7
    VOTE_TIMEOUT = 30.0  # seconds; members answer one peer after the other
    STEP_SLACK = 2
    PACE_GRACE = 10.0  # seconds before a donor's rate is judged
    # Of four trainers one had a third of the line: three peers asked it at once, for 190 to 300 s instead of 20.
    SLOW_SECONDS, MAX_SLOW = 60.0, 2

    def __post_init__(self):
        self.started = time.monotonic()
        self._dials: dict[PeerID, asyncio.Task] = {}
        self._queue: list[PeerID] = []  # donors that are left, the next one last
        self._doubtful: list[PeerID] = []  # those of a step that is not credible
        self._slow: dict[PeerID, float] = {}  # donors put aside, and the seconds that they would need
        self._trainers: set[PeerID] = set()  # that report, without clients, which answer no requests
        self._before: dict[PeerID, asyncio.Task] = {}  # what voters say at the start of the download
        self._first_seed = os.urandom(SEED_BYTES)  # of that; it tells how far they move meanwhile
        self._contradicted: State | None = None
        self._told_credible_step = self._may_retry = self.believes_all = self._asks_again = False

    async def run(self) -> State | None:
        """Return a donor's peer ID, metadata and tensors."""
        for attempt in range(self.MAX_ATTEMPTS):
            await asyncio.sleep(attempt)
            state = await self._ask_all()
            if state is not None or not self._may_retry:
                break
        if state is None and self._contradicted is not None and not self.must_agree:
            state = self._contradicted
            logger.warning(
                f"Using the state of {state[0]} although other peers have another: nobody offers a better one"
            )
        return state

    async def _ask_all(self) -> State | None:
        """Ask each donor once. Sets `_may_retry` after a failure that may be temporary, such as a lost connection."""
        self._may_retry = self._told_credible_step = self.believes_all = self._asks_again = False
        self._slow.clear()
        names = "state_averager.all_averagers", "training_progress"
        offers, records = await asyncio.gather(*(read_records(self.averager, name) for name in names))
        if offers is None or records is None:  # without the reports, anybody that offers a state would vote
            self._may_retry = True
            return None
        reports = self._parse_reports(records)
        self._trainers = {peer for peer, report in reports.items() if not report.client_mode}
        members, newest = self._trainers or likely_donors(offers, self.averager), self._newest_step(reports)
        self._queue, self._doubtful = rank_donors(offers, self.max_step, self.averager.peer_id, members, newest)
        voters = random.sample([*members], min(self.NUM_VOTERS + 1, len(members)))  # one of them may be the donor
        slots, asked = asyncio.Semaphore(self.MAX_DIALS), {*voters, *self._queue, *self._doubtful}
        self._dials = {peer: asyncio.create_task(self._dial(peer, slots)) for peer in asked}
        self._before = {peer: asyncio.create_task(self._ask_digest(peer, self._first_seed)) for peer in voters}
        try:
            while time.monotonic() < self.deadline:
                if not self._queue and self._slow and not self._asks_again:
                    self._queue, self._asks_again = sorted(self._slow, key=lambda d: -self._slow[d]), True
                if not self._queue:
                    if self._told_credible_step or not self._doubtful:
                        return None
                    self._queue, self._doubtful, self.believes_all = self._doubtful, [], True
                if (state := await self._ask(self._queue.pop())) is not None:
                    return state
            return None
        finally:
            tasks = (*self._dials.values(), *self._before.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def deadline(self) -> float:
        return self.started + self.timeout

    @property
    def max_step(self) -> float:
        """Newest step that is credible at this time; it grows by one per second."""
        if self.credible_step is None:
            return math.inf
        return self.credible_step + self.STEP_SLACK + time.monotonic() - self.started

    def _parse_reports(self, records: dict) -> dict[PeerID, PeerProgress]:
        """Return the trainers' reports, with `marks` those of their side."""
        reports = {}
        for subkey, report in read_progress(records).items():
            with suppress(ValueError):
                reports[signer_of(subkey)] = report
        reports.pop(self.averager.peer_id, None)
        reports = drop_paused(reports)
        if self.marks:
            reports = {peer: report for peer, report in reports.items() if not is_forked(self.marks, report.marks)}
            # A report may have marks of its own: the side is what most have.
            self.marks = common_marks([self.marks, *(report.marks for report in reports.values())])
        else:
            self.marks = marks_of_most(reports.values())
        return reports

    def _newest_step(self, reports: dict[PeerID, PeerProgress]) -> float:
        """Return the step that the run has completed by the reports of two trainers, or of the only one."""
        steps = sorted((report.epoch for report in reports.values()), reverse=True)
        if self.credible_step is None and steps:
            self.credible_step = steps[min(1, len(steps) - 1)]
        return math.inf if self.credible_step is None else self.credible_step - 1

    async def _dial(self, donor: PeerID, slots: asyncio.Semaphore) -> Exception | None:
        """Connect to a donor. Return the error, if there is one."""
        async with slots:
            try:
                # With a timeout of 600 s, 1000 unreachable donors take at most 320 s. A relay takes 6 to 18 s.
                async with asyncio.timeout(min(20.0, max(3.0, self.timeout / 20))):
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
            if self.must_agree and not await self._may_be_confirmed(donor):
                logger.info(f"Not downloading the state of {donor} now: no other trainer has the same one yet")
                return None
            logger.info(f"Downloading the state from {donor}")
            metadata, tensors = await self._receive(donor)
            self.layout.unpack(metadata, tensors)
            state = str(donor), metadata, tensors
            if doubt := await self._find_doubt(donor, metadata, tensors):
                logger.warning(f"Postponed the state that {donor} offers: {doubt}")
                self._contradicted = self._contradicted or state
                return None
            if self.believes_all:
                step = f"step #{self.credible_step}, the current step of the run"
                logger.warning(f"No peer offers a state of {step}: using the state of another step")
            return state
        except DoubtfulStepError as error:
            logger.warning(f"Postponed the state that {donor} offers: {error}")
            self._doubtful.append(donor)
        except OldStateError as error:
            logger.info(f"Not using the state that {donor} offers: {error}")
        except ValueError as error:
            logger.warning(f"Refused the state that {donor} offers: {error}")
        except Exception as error:
            logger.warning(f"Could not download the state from {donor}: {describe(error)}")
            self._may_retry |= not isinstance(error, TimeoutError)
        return None

    async def _find_doubt(self, donor: PeerID, metadata: dict, tensors: list[torch.Tensor]) -> str:
        """Return why a state is not used: most voters have another, or it `must_agree` and none has it; else ""."""
        voters, seed = [peer for peer in self._before if peer != donor][: self.NUM_VOTERS], os.urandom(SEED_BYTES)
        await asyncio.gather(*(self._before[peer] for peer in voters))  # a member answers one request at a time
        digests = await asyncio.gather(*(self._ask_digest(peer, seed) for peer in voters))
        said = {peer: digest for peer, digest in zip(voters, digests, strict=True) if digest is not None}
        own = Digest(metadata["epoch"], await asyncio.to_thread(fold, self.layout.groups(tensors), seed))
        votes = await asyncio.gather(*(self._agrees(peer, own, said) for peer in said))
        if votes.count(False) > votes.count(True):
            return "other peers have another"
        needs_vote = self.must_agree and self._are_others(donor)
        return "no other trainer has confirmed it" if needs_vote and not any(votes) else ""

    def _are_others(self, donor: PeerID) -> bool:
        """Whether others than a donor may confirm its state."""
        return bool(self._trainers - {donor} or self._reached([peer for peer in self._before if peer != donor]))

    async def _may_be_confirmed(self, donor: PeerID) -> bool:
        """Whether a voter says that it has about the state which the donor says it has, or nobody is to be asked.

        Monitor and evaluator took one in vain, for two minutes each of a thin line, whose rounds took a minute.
        """
        said = {peer: digest for peer, task in self._before.items() if (digest := await task) is not None}
        own, sizes = said.pop(donor, None), self.layout.sizes
        near = (own is None or is_near(own, other, sizes, None, torch.zeros(len(sizes))) for other in said.values())
        return any(near) or not self._are_others(donor)

    async def _agrees(self, peer: PeerID, own: Digest, said: dict[PeerID, Digest]) -> bool:
        """Whether a voter has about the state of a donor: as near as it is to further voters, and as it has moved.

        With one further voter, which may lie, only the latter counts.

        :param own, said: of the donor's state, and what all voters say of theirs, with the same seed
        """
        first, other, sizes = len(self.layout.parameters), said[peer], self.layout.sizes
        further = [distances(other, digest)[:first] for voter, digest in said.items() if voter != peer]
        spread = torch.stack(further).median(dim=0).values if len(further) > 1 else torch.zeros(first)
        if is_near(own, other, sizes, torch.zeros(first), spread):
            return True
        before, moved = await self._before[peer], None
        now = None if before is None else await self._ask_digest(peer, self._first_seed)
        if before is not None and now is not None and (steps := now.step - before.step) > 0:
            age = min(abs(own.step - other.step), steps + MAX_AGE)
            moved = distances(now, before)[:first] * max(1, age) / steps
        # What is to be published has no bound for an unknown movement: its reader tries again later.
        return (moved is not None or not self.must_agree) and is_near(own, other, sizes, moved, spread)

    async def _ask_digest(self, peer: PeerID, seed: bytes) -> Digest | None:
        """Ask a voter for the digest of its state; None if it cannot be reached or does not say."""
        try:
            if await self._dials[peer] is not None:
                return None
            async with asyncio.timeout(min(self.VOTE_TIMEOUT, max(5.0, (self.deadline - time.monotonic()) / 4))):
                answer = await self._stub(peer).rpc_compare_state(averaging_pb2.DownloadData(metadata=seed))
            return Digest.parse(answer, self.layout.num_groups)
        except Exception as error:
            logger.debug(f"{peer} does not say whether its state is the same: {error!r}")
            return None

    def _stub(self, peer: PeerID) -> StubBase:
        return self.averager.get_stub(self.averager._p2p, peer, namespace=self.averager.prefix)

    async def _receive(self, donor: PeerID) -> tuple[dict, list[torch.Tensor]]:
        """Receive the state of a donor; ValueError if it is not usable or not the expected one."""
        async with asyncio.timeout(self._max_silence()):
            stream = await self._stub(donor).rpc_download_state(averaging_pb2.DownloadRequest())
        assembler, began, patience = None, time.monotonic(), self._max_silence(math.inf)
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
                if assembler is None and not message.metadata and not message.tensor_part.size:
                    if time.monotonic() > began + patience:  # it is making a copy, see rpc_download_state
                        raise ConnectionError("it does not begin to send")
                    continue
                if assembler is None:
                    metadata = self.read_metadata(message.metadata)
                    assembler, began = TensorAssembler(self.layout.specs(metadata)), time.monotonic()
                assembler.add(message.tensor_part)
                if assembler.is_complete:
                    return metadata, assembler.tensors
                self._check_pace(donor, began, assembler.fraction)

    def read_metadata(self, serialized: bytes) -> dict:
        if len(serialized) > self.layout.max_metadata_bytes:
            raise StateLoadError(f"its metadata is too large ({len(serialized)} bytes)")
        try:
            metadata = self.averager.serializer.loads(serialized)
        except Exception:
            raise StateLoadError("its metadata cannot be read") from None
        position = read_position(metadata, self.min_step)
        if is_forked(self.marks, position.marks):
            raise StateLoadError("it is of another history of the run")
        if position.step <= self.max_step:
            self._told_credible_step = True
        elif not self.believes_all:
            raise DoubtfulStepError(f"it is of step #{position.step}, but the run is at step #{self.credible_step}")
        return metadata  # pyright: ignore[reportReturnType]

    def _reached(self, donors: Iterable[PeerID]) -> list[PeerID]:
        return [donor for donor in donors if self._dials[donor].done() and self._dials[donor].result() is None]

    def _max_silence(self, longest: float | None = None) -> float:
        remaining = max(0.0, self.deadline - time.monotonic())
        return min(longest or self.donor_timeout, remaining / 4 if self._reached(self._queue) else remaining)

    def _check_pace(self, donor: PeerID, began: float, fraction: float) -> None:
        """Raise ConnectionError if a donor is too slow and another one is left."""
        elapsed, available = time.monotonic() - began, self.deadline - began
        is_too_slow = elapsed > min(self.PACE_GRACE, available / 10) and elapsed > fraction * 0.75 * available
        if is_too_slow and self._reached(self._queue):
            raise ConnectionError(f"too slow: received {fraction:.1%} in {elapsed:.0f} seconds; asking another donor")
        seconds = elapsed / max(fraction, 1e-3)  # of the whole download
        is_behind = self._reached(self._queue) or any(seconds > of_other for of_other in self._slow.values())
        is_judged = elapsed > self.PACE_GRACE and not self._asks_again and len(self._slow) < self.MAX_SLOW
        if seconds > self.SLOW_SECONDS and is_judged and is_behind:
            self._slow[donor] = seconds
            raise ConnectionError(f"slow: it would take {seconds:.0f} seconds; asking another donor")


def likely_donors(offers: dict, averager: SafeAverager) -> set[PeerID]:
    """Return the donors that a peer has been told as initial peers; all donors if there are none of these."""
    donors = set(read_offers(offers)) - {averager.peer_id}
    told = {str(address).rpartition("/p2p/")[2] for address in getattr(averager.dht, "initial_peers", None) or ()}
    return {donor for donor in donors if str(donor) in told} or donors


async def read_records(averager: SafeAverager, name: str) -> dict | None:
    """Return the records of a run under a key, by subkey; None, with a warning, if they cannot be read."""
    run_id = averager.prefix.removesuffix("_state_averager")
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            found = await averager.dht.get(f"{run_id}_{name}", latest=True, return_future=True)  # pyright: ignore[reportGeneralTypeIssues]
        return found.value if found is not None and isinstance(found.value, dict) else {}
    except Exception as error:
        logger.warning(f"Could not read from the DHT which peers offer a state ({describe(error)}); trying again")
        return None


def read_offers(offers: object) -> dict[PeerID, float]:
    """Return the priority of each offer, which is the donor's step, without malformed ones."""
    found = {}
    for subkey, offer in offers.items() if isinstance(offers, dict) else ():
        priority = offer.value if isinstance(offer, ValueWithExpiration) else None
        if isinstance(priority, int | float) and 0 <= priority <= MAX_STEP:
            with suppress(ValueError):
                found[signer_of(subkey)] = priority
    return found


def drop_paused(reports: dict[PeerID, PeerProgress]) -> dict[PeerID, PeerProgress]:
    """Drop the trainers that are away with an old state: their votes would be against each newer one."""
    newest = max((report.epoch for report in reports.values() if not report.away), default=0)
    return {peer: x for peer, x in reports.items() if not x.away or x.epoch + MAX_AGE >= newest}


def marks_of_most(reports: Collection[PeerProgress]) -> Marks:
    """Return the marks of more than half of the reports. Those of a donor alone would make another history."""
    found = Counter(mark for report in reports for mark in report.marks)
    return tuple(sorted(mark for mark, number in found.items() if 2 * number > len(reports)))


def rank_donors(
    offers: object, max_step: float, own_id: PeerID, members: Collection[PeerID] = (), newest: float = math.inf
) -> tuple[list[PeerID], list[PeerID]]:
    """Sort donors: members last, among them those of the highest step last, ties at random.

    :param newest: step from which on claims of later ones do not count
    :returns: the donors with a credible step, and the other donors, without this peer and malformed offers
    """
    steps = read_offers(offers)
    steps.pop(own_id, None)
    ranks = {donor: (donor in members, min(step, newest), random.random()) for donor, step in steps.items()}
    donors = sorted(ranks, key=lambda donor: ranks[donor])
    likely = [donor for donor in donors if steps[donor] <= max_step]
    return likely, [donor for donor in donors if steps[donor] > max_step]


def describe(error: BaseException) -> str:
    """Return what an error says; of a timeout that says nothing, what it is."""
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
