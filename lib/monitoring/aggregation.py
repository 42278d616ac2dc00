"""From what trainers publish on the DHT to one line a global step: which steps are complete, their loss, who is alive.

Pure logic: no DHT, no clock, no torch. Everything here was written by strangers, so nothing of it is believed blindly.

**Alive** is a peer whose heartbeat (its progress report) is younger than `alive_timeout`, or whose metrics
changed within that time, unless it said goodbye. Keys that share a peer ID are one peer: a trainer that restarted.

**The step of the run** is put to the vote: a live peer votes for the step that it stands at and, with it, for all
before. Peers that no longer take part (behind what was reported, or without a new sample for long) do not vote. Those
that said goodbye after a step that is not reported yet do, for `alive_timeout`: otherwise the slowest, left behind at
the end of a run, would unmake the step that all the others have taken. A step is complete and gets reported, once and
in ascending order, when

1. every voter has reported it or a later one; or
2. half of the voters stand at it or beyond, and the others had `settle_time` to follow.

What more than half of the voters have not nearly reached (`MAX_SPREAD`) is not even kept: one peer, however far ahead,
must neither move the run nor hold it back. A jump of more than `MAX_JUMP` steps is believed only after it has stood
for `settle_time` (six times as long if a single peer tells of it), so that the first record to be seen does not
decide, and at most `MAX_STEPS_PER_SECOND` since the last report, so that one liar who is left alone for a while cannot
either.

**Going back.** Whoever is seen first is believed, since nobody is there to contradict. Should it be a liar, or should
a run that has lost its state begin again, then the trainers stand far behind what was reported. Once more than half of
those who take part do (half, if the jump there was a single peer's word), have made steps before our eyes, and still
do after `settle_time`, their step is the run's: reporting goes on from there.

**A run that is revived** from a checkpoint, after all its trainers were killed, takes the steps since then once more.
Those that were reported are not reported again if they are few: reports go on with the first step that is new. If they
are so many that the trainers make two of them and `settle_time` passes while they still are more than `MAX_SPREAD`
behind, it is a run that has gone back, and the rest of them is reported a second time.

**Limits.** A vote costs a key pair and nothing else. Liars that outnumber the honest voters (two against one) decide
what the step is, and steps that they skip are lost; one against one, a liar is believed `MAX_SPREAD` steps ahead. A
peer's loss and speed are its own word: its weight is bounded, see `StepReport`, but not what it says.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from lib.common.metrics_schema import (
    HISTORY_LENGTH,
    MAX_COUNT,
    MAX_NUMBER,
    MAX_STEP,
    InvalidValue,
    LocalMetrics,
    Metric,
    describe_metrics,
    read_real,
    read_record,
    read_row,
    read_whole,
)

MAX_TIME = 1e12  # seconds; with clocks that far off, the rest of a heartbeat is no better
MAX_SUBKEY_BYTES = 4096  # an RSA-2048 public key with its tag has about 400
MAX_PEER_ID_BYTES = 128  # libp2p's have 34 to 42

MAX_JUMP = HISTORY_LENGTH  # steps between two refreshes that are nothing special
MAX_STEPS_PER_SECOND = 10.0  # far more than any run does: matchmaking alone takes seconds, in a toy demo half of one
LONE_JUMP_FACTOR = 6  # how much longer than others a jump must stand that one peer alone tells of
MAX_SPREAD = 3  # steps that peers may be apart who take part in the same run; averaging together, they hardly are
MAX_PENDING_STEPS = 2 * HISTORY_LENGTH  # unreported steps kept of one peer
# Peers go on computing until they notice that the target is reached and while they look for a group. Four targets from
# one peer are more than that ever gave, except where a single local step exceeds the target.
MAX_OVERSHOOT = 4

_OWNER = re.compile(rb"\[owner:(.+?)\]")  # as hivemind's RSASignatureValidator marks the signer's public key


@cache
def peer_step_class(schema: type[LocalMetrics]) -> type:
    """The class of what one peer, a public key, says of one global step: the metrics of `schema` after `peer`."""
    required = [("peer", bytes)]
    optional = []
    for metric in describe_metrics(schema):
        kind = int if metric.is_whole else float
        if metric.is_optional:
            optional.append((metric.name, kind | None, None))
        else:
            required.append((metric.name, kind))
    return dataclasses.make_dataclass("PeerStep", [*required, *optional], frozen=True, slots=True)


PeerStep = peer_step_class(LocalMetrics)


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """A peer's heartbeat; or its last word (`goodbye`), then all else is empty."""

    peer: bytes  # public key
    peer_id: bytes = b""
    epoch: int = 0
    samples_accumulated: int = 0
    samples_per_second: float = 0.0
    time: float = -math.inf  # seconds on the peer's own clock
    client_mode: bool = False
    goodbye: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """One global step of the whole collaboration.

    `loss`: mean over micro-batches of each peer that took exactly this step, weighted by the peers' samples; None if
    nobody told of any. Of one peer, no more than four target batches are believed, as weight and in `samples`, once
    more than half of the live peers have told of the same target. `metrics`: those that were declared besides the five
    of hivemind's record, by the names of their curves; None if nobody told of any.
    """

    step: int
    loss: float | None
    alive_peers: int
    samples: int
    performance: float  # samples per second of all live peers
    contributors: int  # peers with samples in this step
    mini_steps: int
    time: float  # when it was found complete, seconds
    contributions: tuple[PeerStep, ...] = ()
    metrics: Mapping[str, float | None] = field(default_factory=dict)


def _peer_progress(peer: bytes, value: object) -> PeerProgress:
    if value is None:
        return PeerProgress(peer, goodbye=True)
    if not isinstance(value, Mapping):
        raise InvalidValue("not a dictionary")
    peer_id, client_mode = value.get("peer_id"), value.get("client_mode")
    if not isinstance(peer_id, bytes) or not 0 < len(peer_id) <= MAX_PEER_ID_BYTES or type(client_mode) is not bool:
        raise InvalidValue("wrong fields")
    return PeerProgress(
        peer,
        peer_id,
        epoch=read_whole(value.get("epoch"), 0, MAX_STEP),
        samples_accumulated=read_whole(value.get("samples_accumulated"), 0, MAX_COUNT),
        samples_per_second=read_real(value.get("samples_per_second"), 0.0, MAX_NUMBER),
        time=read_real(value.get("reported_at", value.get("time")), 0.0, MAX_TIME),
        client_mode=client_mode,
    )


def _owner(subkey: object) -> bytes | None:
    """The public key that a record is signed with; None if the subkey cannot be one."""
    if not isinstance(subkey, bytes) or not 0 < len(subkey) <= MAX_SUBKEY_BYTES:
        return None
    tagged = _OWNER.search(subkey)
    return tagged[1] if tagged else subkey


def _records(raw: object, refused: Counter) -> Iterator[tuple[bytes, object]]:
    """Public keys and values of what `dht.get` returned, with or without expiration times."""
    raw = getattr(raw, "value", raw)
    if raw is None:
        return
    if not isinstance(raw, Mapping):
        refused["not a dictionary"] += 1
        return
    for subkey, value in raw.items():
        peer = _owner(subkey)
        if peer is None:
            refused["bad subkey"] += 1
        else:
            yield peer, getattr(value, "value", value)


def parse_metrics(raw: object, schema: type[LocalMetrics] = LocalMetrics) -> tuple[list[PeerStep], Counter]:
    """Read the records under `{run_id}_metrics`.

    :param raw: subkey -> value, as `dht.get` returned it; a value may be a ValueWithExpiration
    :param schema: the metrics to look for
    :returns: the records that make sense, and how many do not, by reason. Never raises
    """
    steps, refused = [], Counter()
    for peer, value in _records(raw, refused):
        try:
            if not isinstance(value, Mapping):
                raise InvalidValue("not a dictionary")
            steps.append(peer_step_class(schema)(peer, *read_record(value, schema)))
        except InvalidValue as refusal:
            refused[str(refusal)] += 1
    return steps, refused


def parse_history(
    raw: object, after_step: int = -1, schema: type[LocalMetrics] = LocalMetrics
) -> tuple[list[PeerStep], Counter]:
    """Read the records under `{run_id}_history`; arguments and result as for `parse_metrics`, one item per entry.

    :param after_step: entries up to this step are skipped unread; they are most of a history
    """
    steps, refused = [], Counter()
    for peer, entries in _records(raw, refused):
        if not isinstance(entries, (list, tuple)):
            refused["not a list"] += 1
            continue
        if len(entries) > HISTORY_LENGTH:
            refused["history too long"] += 1
            continue
        for entry in entries:
            try:
                if isinstance(entry, list | tuple) and entry and type(entry[0]) is int and 0 <= entry[0] <= after_step:
                    continue
                steps.append(peer_step_class(schema)(peer, *read_row(entry, schema)))
            except InvalidValue as refusal:
                refused[str(refusal)] += 1
    return steps, refused


def parse_progress(raw: object) -> tuple[list[PeerProgress], Counter]:
    """Read the heartbeats under `{run_id}_training_progress`; arguments and result as for `parse_metrics`.

    Those of auxiliary peers are left out: they train nothing.
    """
    heartbeats, refused = [], Counter()
    for peer, value in _records(raw, refused):
        if isinstance(value, Mapping) and value.get("auxiliary") is True:
            continue
        try:
            heartbeats.append(_peer_progress(peer, value))
        except InvalidValue as refusal:
            refused[str(refusal)] += 1
    return heartbeats, refused


def parse_usernames(raw: object) -> dict[bytes, str]:
    """Read the names under `{run_id}_peers`: public key -> what its owner calls itself, which may be anything."""
    return {
        peer: value["username"]
        for peer, value in _records(raw, Counter())
        if isinstance(value, Mapping) and isinstance(value.get("username"), str)
    }


def parse_target_batch_sizes(raw: object) -> dict[bytes, int]:
    """Read the target batch sizes under `{run_id}_peers`: public key -> samples of a global step, by its word."""
    return {
        peer: value["target_batch_size"]
        for peer, value in _records(raw, Counter())
        if isinstance(value, Mapping)
        and type(value.get("target_batch_size")) is int
        and 1 <= value["target_batch_size"] <= MAX_COUNT
    }


@dataclass(slots=True)
class _Peer:
    """What is known of one public key. Times are in seconds on the monitor's clock."""

    key: bytes
    moved: float  # when its step or its number of samples last changed
    present: float  # when it was last found in the DHT
    pending: dict[int, PeerStep] = field(default_factory=dict)  # its steps that are not reported yet
    newest: PeerStep | None = None
    progress: PeerProgress | None = None
    last_alive: float = -math.inf
    left: float | None = None  # when its goodbye was found
    num_steps_seen: int = 0  # steps that it has made since it is known

    @property
    def identity(self) -> bytes:
        return self.progress.peer_id if self.progress else self.key

    @property
    def reported_step(self) -> int:
        return self.newest.step if self.newest else -1

    @property
    def step(self) -> int:
        """Where it stands: the heartbeat of a step may be there before its metrics are."""
        return max(self.reported_step, self.progress.epoch if self.progress else -1)

    def newest_value(self, metric: Metric) -> float:
        """0 if it has not told; a peer without metrics yet may have told in its heartbeat."""
        return getattr(self.newest or self.progress, metric.name, None) or 0.0


@dataclass(frozen=True, slots=True)
class _Vote:
    """The farthest step that is reached by so many voters; -1 if there are none."""

    all: int  # ... and reported, not only said to be reached
    majority: int  # more than half
    half: int  # half or more
    ceiling: float  # the farthest step to be believed of anyone


class MetricsAggregator:
    """Turns successive views of the DHT into one StepReport per global step; the module's docstring has the rules.

    Memory and time are bounded by `max_peers` and MAX_PENDING_STEPS, whatever is published: known peers go before
    unknown ones, and if all `max_peers` are alive, newcomers are refused.

    :param last_reported_step: the newest step that was reported before a restart, -1 if none; nothing up to it is
        repeated
    :param alive_timeout: seconds without a sign of life after which a peer is gone. hivemind's heartbeat comes at
        least every half `metadata_expiration`, which is 60 seconds here
    :param settle_time: seconds that stragglers are waited for
    :param target_batch_size: samples of a global step, until more than half of the live peers agree on one; bounds the
        weight of one peer, None: no bound
    :param max_peers: the most public keys that are tracked
    :param schema: the metrics to aggregate
    :raises ValueError: if a duration or `max_peers` is not above zero
    """

    def __init__(
        self,
        last_reported_step: int = -1,
        alive_timeout: float = 120.0,
        settle_time: float = 30.0,
        target_batch_size: int | None = None,
        max_peers: int = 2000,
        schema: type[LocalMetrics] = LocalMetrics,
    ):
        if min(alive_timeout, settle_time, max_peers) <= 0:
            raise ValueError("alive_timeout, settle_time and max_peers must be above zero")
        self.last_reported_step = last_reported_step
        self.alive_timeout, self.settle_time, self.max_peers = alive_timeout, settle_time, max_peers
        self.target_batch_size, self.schema = target_batch_size, schema
        self.refused: Counter = Counter()  # records that the newest update did not use, by reason
        self.alive_peers = self.alive_clients = 0  # at the newest update; clients accept no connections
        self.run_step: int | None = None  # where more than half of the voters stood then, None without any
        self._peers: dict[bytes, _Peer] = {}
        self._reached: dict[int, float] = {}  # pending step -> when half of the voters were first seen there
        self._now = -math.inf
        self._last_report_time: float | None = None
        self._read_any_metrics = False
        self._lone_witness: bytes | None = None  # the peer of whom alone we have the steps reported last ...
        self._told_alone_after = -1  # ... all those after this one ...
        self._has_jumped = False  # ... and whether there was a jump among them
        self._behind_since: float | None = None  # when those who take part were first seen to stand behind

    def update(
        self,
        now: float,
        metrics: object = None,
        history: object = None,
        progress: object = None,
        peers: object = None,
    ) -> list[StepReport]:
        """Take in what the DHT holds now and return the steps that are complete, in ascending order.

        :param now: hivemind's DHT time in seconds; heartbeats are compared with it
        :param metrics: the dictionary under `{run_id}_metrics` as `dht.get` returned it; None or {} if there is none
        :param history: the same for `{run_id}_history`
        :param progress: the same for `{run_id}_training_progress`
        :param peers: the same for `{run_id}_peers`
        """
        self._now = max(now, self._now)
        self.refused = Counter()
        steps = self._take_in(metrics, history, progress)
        live_peers = self._live_peers()
        self._learn_target(parse_target_batch_sizes(self._bounded(peers)), live_peers)
        if self._go_back_if_outvoted(live_peers):
            steps = []  # the histories were not read that far back; they are all there at the next update
        vote = self._vote(live_peers)
        self._keep_steps(steps, vote)
        reports = self._take_complete(vote, live_peers)
        self._forget_absent_peers()
        return reports

    def flush(self, now: float) -> list[StepReport]:
        """At shutdown: the steps that more than half of the voters have reached, without waiting for stragglers."""
        self._now = max(now, self._now)
        live_peers = self._live_peers()
        return self._take_complete(self._vote(live_peers), live_peers, wait_for_stragglers=False)

    # Taking in records

    def _take_in(self, metrics: object, history: object, progress: object) -> list[PeerStep]:
        """Note who is there and where they stand; return all steps that they tell of."""
        heartbeats, refused_progress = parse_progress(self._bounded(progress))
        steps, refused_metrics = parse_metrics(self._bounded(metrics), self.schema)
        old_steps, refused_history = parse_history(self._bounded(history), self.last_reported_step, self.schema)
        self.refused += refused_progress + refused_metrics + refused_history
        steps += old_steps

        newcomers = {record.peer for record in (*heartbeats, *steps)} - self._peers.keys()
        if len(self._peers) + len(newcomers) > self.max_peers:
            self._peers = {key: peer for key, peer in self._peers.items() if self._is_alive(peer)}
        for heartbeat in heartbeats:
            self._note_progress(heartbeat)
        newest: dict[bytes, PeerStep] = {}
        for record in steps:
            if record.step > newest.setdefault(record.peer, record).step:
                newest[record.peer] = record
        # Metrics live for minutes after their peer has died. Those that a monitor finds when it starts prove no life,
        # if there are heartbeats to go by.
        is_news = self._read_any_metrics or not heartbeats
        for record in newest.values():
            self._note_newest(record, is_news)
        self._read_any_metrics |= bool(newest)
        return steps

    def _bounded(self, raw: object) -> object:
        """At most `max_peers` of the records, those of known peers first."""
        raw = getattr(raw, "value", raw)
        if not isinstance(raw, Mapping) or len(raw) <= self.max_peers:
            return raw
        self.refused["too many records"] += len(raw) - self.max_peers
        known_first = sorted(raw, key=lambda subkey: _owner(subkey) not in self._peers)
        return {subkey: raw[subkey] for subkey in known_first[: self.max_peers]}

    def _find_peer(self, key: bytes) -> _Peer | None:
        peer = self._peers.get(key)
        if peer is None:
            if len(self._peers) >= self.max_peers:
                self.refused["too many peers"] += 1
                return None
            peer = self._peers[key] = _Peer(key, moved=self._now, present=self._now)
        peer.present = self._now
        return peer

    def _note_progress(self, heartbeat: PeerProgress) -> None:
        peer = self._find_peer(heartbeat.peer)
        if peer is None or heartbeat == peer.progress:
            return
        if heartbeat.goodbye:
            if peer.left is None:
                peer.left = self._now
            return
        # A clock that is ahead buys no longer life: what counts is when this heartbeat was first seen.
        time = min(heartbeat.time, self._now)
        if peer.left is not None and time > peer.left:
            peer.left = None
        peer.last_alive = max(peer.last_alive, time)
        before, peer.progress = peer.progress, heartbeat
        if before and (before.epoch, before.samples_accumulated) != (heartbeat.epoch, heartbeat.samples_accumulated):
            peer.moved = self._now

    def _note_newest(self, record: PeerStep, is_news: bool) -> None:
        peer = self._find_peer(record.peer)
        if peer is None or record == peer.newest:
            return
        if peer.newest is not None and record.step <= self.last_reported_step:
            self.refused["late"] += 1
        if peer.newest is not None and peer.newest.step < record.step <= peer.newest.step + MAX_SPREAD:
            peer.num_steps_seen += 1
        peer.newest, peer.moved = record, self._now
        if is_news:
            peer.last_alive = self._now

    def _keep_steps(self, steps: list[PeerStep], vote: _Vote) -> None:
        for record in steps:
            peer = self._peers.get(record.peer)
            if peer is None or record.step <= self.last_reported_step or record.step in peer.pending:
                continue
            # Nobody can tell of a step before the run is there; if it is true, the history will bring it again.
            if record.step > vote.ceiling:
                self.refused["ahead of the run"] += 1
            elif len(peer.pending) >= MAX_PENDING_STEPS:
                self.refused["too many unreported steps"] += 1
            else:
                peer.pending[record.step] = record

    # Who is there

    def _is_alive(self, peer: _Peer) -> bool:
        return peer.left is None and self._now - peer.last_alive <= self.alive_timeout

    def _has_just_left(self, peer: _Peer) -> bool:
        return peer.left is not None and self._now - peer.left <= self.alive_timeout

    def _live_peers(self) -> list[_Peer]:
        """Each live peer once: of the keys with the same peer ID, the one that was heard of last."""
        live: dict[bytes, _Peer] = {}
        for peer in self._peers.values():
            rival = live.get(peer.identity)
            if self._is_alive(peer) and (rival is None or peer.last_alive >= rival.last_alive):
                live[peer.identity] = peer
        return list(live.values())

    def _learn_target(self, told: dict[bytes, int], live_peers: list[_Peer]) -> None:
        """Take over the target batch size that more than half of the live peers tell of; else keep the one before."""
        votes = Counter(told[peer.key] for peer in live_peers if peer.key in told)
        for target, number in votes.most_common(1):
            if 2 * number > len(live_peers):
                self.target_batch_size = target

    def _is_moving(self, peer: _Peer) -> bool:
        return self._now - peer.moved <= 2 * self.alive_timeout

    def _is_behind(self, peer: _Peer) -> bool:
        return peer.step < self.last_reported_step - MAX_SPREAD

    def _go_back_if_outvoted(self, live_peers: list[_Peer]) -> bool:
        """Whether the run turned out to be far behind what was reported; see "Going back" above."""
        moving = [peer for peer in live_peers if self._is_moving(peer)]
        behind = [peer.step for peer in moving if self._is_behind(peer) and peer.num_steps_seen >= 2]
        needed = len(moving) / 2 if self._lone_witness and self._has_jumped else (len(moving) + 1) / 2
        if len(behind) < needed or not behind:
            self._behind_since = None
            return False
        if self._behind_since is None:
            self._behind_since = self._now
        if self._now - self._behind_since < self.settle_time:
            return False
        stands = sorted(behind)[len(behind) // 2]
        is_doubtful = self._lone_witness is not None and self._told_alone_after < stands
        self.last_reported_step = self._told_alone_after if is_doubtful else stands - 1
        self._last_report_time = self._behind_since = self._lone_witness = None
        for peer in self._peers.values():
            peer.pending.clear()
        return True

    def _voters(self, live_peers: list[_Peer]) -> list[_Peer]:
        """Those who take part or have just taken a step and left. If there are none, all who ever left such a step."""
        taking_part = [peer for peer in live_peers if not self._is_behind(peer) and self._is_moving(peer)]
        unreported = [peer for peer in self._peers.values() if peer.reported_step > self.last_reported_step]
        there = {peer.identity for peer in live_peers}  # who has left and come back votes once
        just_left = [peer for peer in unreported if self._has_just_left(peer) and peer.identity not in there]
        return taking_part + just_left or unreported

    def _vote(self, live_peers: list[_Peer]) -> _Vote:
        voters = self._voters(live_peers)
        self.alive_peers = len(live_peers)
        self.alive_clients = sum(peer.progress is not None and peer.progress.client_mode for peer in live_peers)
        self.run_step = None
        if not voters:
            return _Vote(-1, -1, -1, -1)
        stands = sorted((peer.step for peer in voters), reverse=True)
        half, self.run_step = stands[(len(stands) - 1) // 2], stands[len(stands) // 2]
        possible = math.inf
        if self._last_report_time is not None:
            elapsed = self._now - self._last_report_time
            possible = self.last_reported_step + MAX_JUMP + MAX_STEPS_PER_SECOND * elapsed
        return _Vote(
            all=min(peer.reported_step for peer in voters),
            majority=self.run_step,
            half=half,
            ceiling=min(self.run_step + MAX_SPREAD, possible),
        )

    def _forget_absent_peers(self) -> None:
        for key, peer in list(self._peers.items()):
            if not self._is_alive(peer) and self._now - peer.present > 2 * self.alive_timeout:
                del self._peers[key]

    # Which steps are complete

    def _take_complete(
        self, vote: _Vote, live_peers: list[_Peer], wait_for_stragglers: bool = True
    ) -> list[StepReport]:
        reached = min(vote.half, vote.ceiling)
        pending = sorted({step for peer in self._peers.values() for step in peer.pending if step <= reached})
        self._reached = {step: self._reached.get(step, self._now) for step in pending}
        complete = self.last_reported_step
        for step in pending:
            near = step <= complete + (MAX_JUMP if complete >= 0 else MAX_SPREAD)  # a run begins at step 0 or 1
            is_lone = not near and sum(step in peer.pending for peer in self._peers.values()) == 1
            patience = self.settle_time * (LONE_JUMP_FACTOR if is_lone else 1)
            settled = self._now - self._reached[step] >= patience
            at_once = step <= vote.all or (step <= vote.majority and not wait_for_stragglers)
            if settled or (near and at_once):
                complete = step
        reports = [self._report(step, live_peers) for step in pending if step <= complete]
        if reports:
            self._note_witnesses(reports)
            self._mark_reported(complete)
        return reports

    def _note_witnesses(self, reports: list[StepReport]) -> None:
        before = self.last_reported_step
        for report in reports:
            peers = {record.peer for record in report.contributions}
            witness = peers.pop() if len(peers) == 1 else None
            if witness is None or witness != self._lone_witness:
                self._lone_witness, self._told_alone_after, self._has_jumped = witness, before, False
            self._has_jumped |= report.step > before + MAX_JUMP
            before = report.step

    def _mark_reported(self, step: int) -> None:
        self.last_reported_step = step
        self._last_report_time = self._now
        for peer in self._peers.values():
            for old_step in [pending for pending in peer.pending if pending <= step]:
                del peer.pending[old_step]

    def _report(self, step: int, live_peers: list[_Peer]) -> StepReport:
        contributions = [peer.pending[step] for peer in self._peers.values() if step in peer.pending]
        believed = [self._bound_samples(peer_step) for peer_step in contributions]
        values = {
            metric.name: _combine(metric, believed, live_peers)
            for metric in describe_metrics(self.schema)
            if metric.combine is not None
        }
        return StepReport(
            step=step,
            loss=values.pop("loss"),
            alive_peers=len(live_peers),
            samples=values.pop("samples_accumulated"),
            performance=values.pop("samples_per_second"),
            contributors=sum(peer_step.samples_accumulated > 0 for peer_step in contributions),
            mini_steps=values.pop("mini_steps"),
            time=self._now,
            contributions=tuple(contributions),
            metrics={name.replace("_", " "): value for name, value in values.items()},
        )

    def _bound_samples(self, peer_step: PeerStep) -> PeerStep:
        """What is believed of a peer's word: no more samples than `MAX_OVERSHOOT` targets."""
        bound = math.inf if self.target_batch_size is None else MAX_OVERSHOOT * self.target_batch_size
        if peer_step.samples_accumulated <= bound:
            return peer_step
        return dataclasses.replace(peer_step, samples_accumulated=bound)


def _combine(metric: Metric, peer_steps: Sequence[PeerStep], live_peers: Sequence[_Peer]) -> float | None:
    """The value of a global step, see `LocalMetrics` for the rules; None if no peer has one."""
    if metric.combine == "live sum":
        return math.fsum(peer.newest_value(metric) for peer in live_peers)
    if metric.combine == "mean":
        return _weighted_mean(metric, peer_steps)
    values = [value for peer_step in peer_steps if (value := getattr(peer_step, metric.name)) is not None]
    if not values:
        return None
    if metric.combine == "maximum":
        return max(values)
    return sum(values) if metric.is_whole else math.fsum(values)


def _weighted_mean(metric: Metric, peer_steps: Sequence[PeerStep]) -> float | None:
    """Weighted by samples; of a peer that has a value for `metric.per`, if any, above zero."""
    values, weights = [], []
    for peer_step in peer_steps:
        value, samples = getattr(peer_step, metric.name), peer_step.samples_accumulated
        divisor = 1 if metric.per is None else getattr(peer_step, metric.per)
        if value is not None and divisor and samples > 0:
            values.append(value / divisor)
            weights.append(samples)
    if not weights:
        return None
    mean = math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    return min(max(mean, min(values)), max(values))  # rounding must not leave the range
