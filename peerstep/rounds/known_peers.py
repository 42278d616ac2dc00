"""The peers of whom this peer has read a report, and what they have signed: the check of a leader's list."""

import functools
import itertools
import math
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.peer.clock import run_time
from peerstep.reports.records import signer_of
from peerstep.rounds.claims import MAX_SILENT, SIGNATURE_BYTES, Claims, parse_claims, sign, tag_of, verify

KNOWN_SECONDS = 180.0  # for which a peer that was in a roster is no stranger; its report lives as long
MAX_HELD_REQUESTS = 1024  # of a leader
# Listed peers of which a member has read no report, see `strangers_in`. It asks for their keys, which have 388 bytes
MAX_STRANGERS = 64
STALE_SECONDS = 3600.0  # after which a member's claims are no longer believed; no search takes as long


@dataclass
class KnownPeers:
    """Signs this peer's claims and checks those of others.

    Claims are for one leader and one step, and have a time: nobody can use them elsewhere, or again.
    """

    peer_id: PeerID
    private_key: RSAPrivateKey | None  # None: the state averager forms no groups
    run: bytes  # tells runs, models and kinds of rounds apart
    public_keys: dict[PeerID, bytes] = field(default_factory=dict)  # peers -> subkeys of their records
    _seen: dict[PeerID, float] = field(default_factory=dict)  # when they were in a roster (`time.monotonic`)
    # Leader and member -> time of the newest claims in its lists, which it knows, too: nobody makes its list look old
    _asked_at: dict[tuple[PeerID, PeerID], float] = field(default_factory=dict)
    _signed_at: float = 0.0  # of this peer's newest claims

    def update(self, present: Mapping[PeerID, bytes]) -> None:
        """Record the peers of a roster, with their keys, and forget those that were in none for KNOWN_SECONDS."""
        now = time.monotonic()
        self._seen |= dict.fromkeys(present, now)
        self._seen = {peer_id: seen for peer_id, seen in self._seen.items() if now < seen + KNOWN_SECONDS}
        keys = {**self.public_keys, **present}
        self.public_keys = {peer_id: key for peer_id, key in keys.items() if peer_id in self._seen}
        self._asked_at = {pair: newest for pair, newest in self._asked_at.items() if self._seen.keys() >= {*pair}}

    def record_members(self, leader: PeerID, claims: Mapping[PeerID, Claims]) -> None:
        """Record the claims in a leader's list: older ones no longer count in another one."""
        self._asked_at |= {(leader, peer_id): of_peer.asked_at for peer_id, of_peer in claims.items()}

    def is_fresh(self, leader: PeerID, peer_id: PeerID, asked_at: float, seconds: float = STALE_SECONDS) -> bool:
        """Whether claims to a leader are newer than those in its lists, and from at most `seconds` ago or ahead."""
        return asked_at > self._asked_at.get((leader, peer_id), -1.0) and abs(run_time() - asked_at) <= seconds

    def sign(self, packed: bytes, step: int, leader: PeerID, silent: Iterable[PeerID]) -> bytes:
        """Return this peer's entry for the list of a leader."""
        tags = tuple(map(tag_of, silent))[:MAX_SILENT]
        self._signed_at = max(run_time(), math.nextafter(self._signed_at, math.inf))  # a clock may be set back
        claims = replace(parse_claims(packed), asked_at=self._signed_at, silent=tags)
        assert self.private_key is not None
        return sign(self.private_key, self.scope_of(self.peer_id, step, leader), claims.pack())

    def has_signed(self, peer_id: PeerID, step: int, leader: PeerID, entry: bytes, key: bytes) -> bool:
        """Return whether a peer has signed an entry, and a key is the one from which its peer ID follows."""
        with suppress(ValueError):
            return signer_of(key) == peer_id and verify(key, self.scope_of(peer_id, step, leader), entry)
        return False

    @functools.cached_property
    def own_key(self) -> bytes:
        """This peer's public key, which checks its entries."""
        assert self.private_key is not None
        return RSASignatureValidator(self.private_key).local_public_key

    @property
    def all_keys(self) -> dict[PeerID, bytes]:
        return {**self.public_keys, self.peer_id: self.own_key}

    def strangers_in(self, peer_ids: Collection[PeerID]) -> set[PeerID]:
        """Return the peers whose report this one has not read: it may be late, or be shown to one reader only."""
        return {*peer_ids} - {self.peer_id, *self.public_keys}

    def are_mostly_known(self, peer_ids: Collection[PeerID]) -> bool:
        """Whether a third at most are strangers."""
        return 3 * len(self.strangers_in(peer_ids)) <= len(peer_ids)

    def scope_of(self, peer_id: PeerID, step: int, leader: PeerID) -> bytes:
        return MSGPackSerializer.dumps([self.run, step, leader.to_bytes(), peer_id.to_bytes()])

    def check_list(
        self, entries: Mapping[PeerID, bytes], step: int, leader: PeerID, own: bytes, keys: Mapping[PeerID, bytes]
    ) -> None:
        """Raise ValueError unless each entry is what its peer has asked this leader with, for this step and lately.

        :param own: what this peer has asked it with
        :param keys: those of the peers, as far as they are known; the entries of others are not checked
        """
        if entries.get(self.peer_id) != own or leader not in entries:
            raise ValueError("without what this peer has sent, or without its leader")
        claims = {peer_id: parse_claims(entry[:-SIGNATURE_BYTES]) for peer_id, entry in entries.items()}
        for peer_id in (entries.keys() & keys.keys()) - {self.peer_id}:
            if not self.has_signed(peer_id, step, leader, entries[peer_id], keys[peer_id]):
                raise ValueError(f"{peer_id} has not signed its entry")
            if not self.is_fresh(leader, peer_id, claims[peer_id].asked_at):
                raise ValueError(f"an old entry of {peer_id}")
        if not any(of_peer.bandwidth for of_peer in claims.values()):
            raise ValueError("nobody reduces")


def read_peer_id(content: bytes) -> PeerID | None:
    """Return a peer ID that another peer has sent; None if it has no possible length, see patches.py."""
    with suppress(ValueError):
        return PeerID(content) if content else None


def parse_keys(contents: Iterable[bytes]) -> dict[PeerID, bytes]:
    """Return the keys that a peer has sent, each with the peer ID that follows from it."""
    keys = {}
    for content in itertools.islice(contents, MAX_STRANGERS):
        with suppress(ValueError):
            keys[signer_of(content)] = content
    return keys


def parse_list(message: averaging_pb2.MessageFromLeader) -> dict[PeerID, bytes]:
    """Return the entries of a leader's list; ValueError if it is malformed."""
    content, gathered = message.ordered_peer_ids, message.gathered
    if len(content) != len(gathered) or len(content) > MAX_HELD_REQUESTS + 1:  # in 4 MiB, there are two million
        raise ValueError("peers without entries, or too many")
    entries = {read_peer_id(peer_id): entry for peer_id, entry in zip(content, gathered, strict=True)}
    if None in entries or len(entries) < len(content):
        raise ValueError("a wrong or repeated peer ID")
    return entries  # pyright: ignore[reportReturnType]
