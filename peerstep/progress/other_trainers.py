"""The newest reports of the other trainers, and which of them are ignored. No threads, no clocks."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from peerstep.peer.clock import run_time
from peerstep.progress.view import ALIVE_SECONDS, HEARTBEAT_SECONDS
from peerstep.reports.progress_report import PROTOCOL, PeerProgress, parse_progress
from peerstep.reports.records import signer_of

logger = get_logger(__name__)

PROBATION_SECONDS = 1.5 * HEARTBEAT_SECONDS  # for which a peer counts as alive whose first report looks old
IGNORE_SECONDS = 600.0  # for which a peer is ignored after a violation
# Seconds for which a peer is ignored that this peer does not reach: at first, and at most after doubling each time
SILENCE_SECONDS, MAX_SILENCE_SECONDS = 30.0, 120.0
MAX_FRUITLESS = 2  # consecutive rounds without a peer after which this peer does not rely on it
MIN_MEMBERS = 32  # of the last rounds, which store and answer reports; in large runs half as many as trainers
WARN_SECONDS = 600.0  # between two warnings about the same peer


class OtherTrainers:
    """What this peer has read of the others, and what it has seen of them in rounds.

    :param subkey: of this peer's own report
    :param now: in all methods, `time.monotonic`
    """

    def __init__(self, subkey: bytes, now: float):
        self._subkey = subkey
        self.reports: dict[bytes, PeerProgress] = {}  # subkey -> newest report of a peer
        self.misfits: frozenset[bytes] = frozenset()  # peer IDs of live trainers with another schema
        self.members: list[bytes] = []  # peer IDs of the last rounds that can be called, the newest at the end
        self.read_at, self.begun_at = now, -math.inf  # when the reports were read, and when that read began
        self.newcomer_at = -math.inf  # when a peer was read for the first time
        self.num_reads_apart = 0  # see View
        self._warned_at: dict[bytes, float] = {}
        self._violators: dict[bytes, float] = {}  # peer ID -> time until which the peer is ignored
        # Peer ID -> the same for a peer that was not reached, and for how many seconds it was ignored
        self._silent: dict[bytes, tuple[float, float]] = {}
        self._fruitless: Counter[bytes] = Counter()  # consecutive rounds without a peer

    def heard(self, now: float) -> tuple[PeerProgress, ...]:
        """Return the newest reports, without those of ignored peers."""
        ends = self._violators | {peer_id: until for peer_id, (until, _) in self._silent.items()}
        return tuple(p for p in self.reports.values() if ends.get(p.peer_id, -math.inf) <= now)

    @property
    def keys(self) -> dict[bytes, bytes]:
        """The subkey of each peer's records, by peer ID."""
        return {progress.peer_id: subkey for subkey, progress in self.reports.items()}

    @property
    def fruitless(self) -> frozenset[bytes]:
        """Peers that have not taken part in the last rounds of this peer."""
        return frozenset(peer_id for peer_id, number in self._fruitless.items() if number >= MAX_FRUITLESS)

    # What is ignored

    def ignore(self, silent: Iterable[PeerProgress], now: float) -> int:
        """Ignore peers that this peer does not reach for a while, which grows. Return their number."""
        peers = list(silent)
        for progress in peers:
            _, before = self._silent.get(progress.peer_id, (0.0, SILENCE_SECONDS / 2))
            seconds = min(2 * before, MAX_SILENCE_SECONDS)
            self._silent[progress.peer_id] = now + seconds, seconds
        return len(peers)

    def hear_all(self) -> None:
        """Stop ignoring peers that this peer did not reach: it was asked for a group, or has joined their side."""
        self._silent = {peer_id: (-math.inf, seconds) for peer_id, (_, seconds) in self._silent.items()}

    def record_round(
        self, members: Iterable[PeerID], violators: Collection[PeerID], fruitless: Collection[PeerID], now: float
    ) -> None:
        """Record who took part in a round with this peer.

        :param violators: members that have sent what no honest peer sends
        :param fruitless: members that have sent nothing, and peers that were expected and did not join
        """
        missing = {peer_id.to_bytes() for peer_id in fruitless}
        clients = {progress.peer_id for progress in self.reports.values() if progress.client_mode}
        newest = [peer_id.to_bytes() for peer_id in members]
        known = [member for member in self.members if member not in newest] + newest
        number = max(MIN_MEMBERS, len(self.reports) // 2)
        self.members = [member for member in known if member not in clients][-number:]
        for peer_id in newest:
            self._violators.pop(peer_id, None)
            self._silent.pop(peer_id, None)
            if peer_id not in missing:
                del self._fruitless[peer_id]
        self._fruitless.update(missing)
        self._violators.update(dict.fromkeys((peer_id.to_bytes() for peer_id in violators), now + IGNORE_SECONDS))

    # Reads

    def read(self, records: Mapping, schema: str, latest_expiration: float, begun_at: float, now: float) -> None:
        """Take in the answer of the DHT.

        :param records: subkey -> record; one answer may lack peers, as after a failure of a link
        :param schema: of this peer's rounds
        :param latest_expiration: from which on a record is of a live peer, `run_time`
        :param begun_at: when the read began
        """
        others, misfits = {}, set()
        for subkey, progress in self.reports.items():
            if now - progress.reported_here < ALIVE_SECONDS:
                others[subkey] = progress
        for subkey, record in records.items():
            if record.value is None or subkey == self._subkey:  # a peer that leaves replaces its report by None
                others.pop(subkey, None)
                continue
            try:
                if self._may_average(subkey, record.value, schema, now):
                    progress = parse_progress(signer_of(subkey).to_bytes(), record.value)
                    others[subkey] = self._date(subkey, progress, now)
                elif record.expiration_time > latest_expiration:
                    misfits.add(signer_of(subkey).to_bytes())
            except ValueError as error:
                logger.debug(f"Ignoring a malformed progress report: {error}")
        self.newcomer_at = now if others.keys() - self.reports.keys() else self.newcomer_at
        self.reports, self.misfits = others, frozenset(misfits)
        self.read_at, self.begun_at = now, begun_at
        known = {progress.peer_id for progress in others.values()}
        self._fruitless = Counter({peer_id: n for peer_id, n in self._fruitless.items() if peer_id in known})
        self._violators = {peer_id: until for peer_id, until in self._violators.items() if until > now}
        self._silent = {peer_id: silence for peer_id, silence in self._silent.items() if peer_id in known}

    def _date(self, subkey: bytes, progress: PeerProgress, now: float) -> PeerProgress:
        """Return a report with the time at which it was made, on this machine's clock.

        A report that differs from the previous one was made since that was read, whatever the clocks say. If the
        first report of a peer looks old, the peer may be dead or its clock may be late: it gets time for another one.
        """
        before = self.reports.get(subkey)
        if before is not None and before.reported_at == progress.reported_at:
            return replace(progress, reported_here=before.reported_here)
        earliest = now + PROBATION_SECONDS - ALIVE_SECONDS if before is None else self.read_at
        return replace(progress, reported_here=min(now, max(earliest, now - (run_time() - progress.reported_at))))

    def _may_average(self, subkey: bytes, record: object, schema: str, now: float) -> bool:
        """Whether a trainer has the protocol and the schema of this peer; if not, warn now and then."""
        fields = record if isinstance(record, dict) else {}
        if (protocol := fields.get("protocol")) != PROTOCOL:
            message = (
                f"A trainer of this run has protocol {protocol!r:.20}, this trainer has {PROTOCOL}: they do not "
                "average with each other. Update the older one"
            )
        elif fields.get("schema") != schema:
            message = (
                "A trainer of this run has another model or tokenizer, other initial weights (see join_run), another "
                "compression, another interval of averaged parameters, or only one of both has local updates: they do "
                "not average with each other. Pass the same options to all peers"
            )
        else:
            return True
        if now >= self._warned_at.get(subkey, -math.inf) + WARN_SECONDS and len(self._warned_at) < 1000:
            self._warned_at[subkey] = now
            logger.warning(message)
        return False
