"""What the members of a group claim, each signed by its owner, and the groups that follow from it.

A leader passes signed claims on. Each member computes everything else about its group: who is in it if there are
several, its ID, and who reduces nothing. The leader decides only whom it leaves out, see StepMatchmaking.
"""

import base64
import functools
import hashlib
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hivemind.averaging.group_info import GroupInfo
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from peerstep.reports.marks import MARK_BYTES
from peerstep.reports.progress_report import MAX_LAG, MAX_TIME

_CLAIMS = struct.Struct(f"<dd?d{MARK_BYTES}s")
MAX_BANDWIDTH = 1e9  # bound on a member's claim; only ratios matter
MAX_SILENT, TAG_BYTES = 8, 8  # silent reducers that a member names, and bytes of each one's peer ID
SIGNATURE_BYTES = 256  # of RSA with 2048 bits: 0.4 ms to sign, 0.03 ms to check
KEY_BYTES = 388  # of the key that checks it, as the subkey of the peer's records
ID_BYTES = 8  # of the ID of a group, which are the same for all groups of a list


@dataclass(frozen=True)
class Claims:
    """What a peer says of itself when it joins a group."""

    bandwidth: float  # Mbit/s; 0: it reduces nothing, as a peer in client mode
    distance: float = 0.0  # updates that its parameters lack, see CollaborativeOptimizer
    is_settling: bool = False  # whether its optimizer statistics lack updates that its parameters have
    asked_at: float = 0.0  # when it asked the leader, on its clock; later claims of a peer have a later time
    silent: tuple[bytes, ...] = ()  # tags of the reducers that have answered it nothing, see `tag_of`
    mark: bytes = bytes(MARK_BYTES)  # the newest one of its history

    def pack(self) -> bytes:
        """Return the bytes that a peer signs, see `parse_claims`."""
        content = _CLAIMS.pack(self.bandwidth, self.distance, self.is_settling, self.asked_at, self.mark)
        return content + b"".join(self.silent)


def parse_claims(packed: bytes) -> Claims:
    """Return what a member claims; ValueError if it is malformed."""
    rest = packed[_CLAIMS.size :]
    if len(packed) < _CLAIMS.size or len(rest) % TAG_BYTES or len(rest) > MAX_SILENT * TAG_BYTES:
        raise ValueError("claims of a wrong length")
    silent = tuple(rest[begin : begin + TAG_BYTES] for begin in range(0, len(rest), TAG_BYTES))
    bandwidth, distance, is_settling, asked_at, mark = _CLAIMS.unpack(packed[: _CLAIMS.size])
    claims = Claims(bandwidth, distance, is_settling, asked_at, silent, mark)
    in_range = 0 <= claims.bandwidth <= MAX_BANDWIDTH and 0 <= claims.distance <= MAX_LAG
    if not (in_range and 0 <= claims.asked_at <= MAX_TIME):
        raise ValueError("claims out of range")
    return claims


def tag_of(peer_id: PeerID) -> bytes:
    """Return the bytes that name a peer in claims."""
    return peer_id.to_bytes()[-TAG_BYTES:]


def sign(key: RSAPrivateKey, scope: bytes, packed: bytes) -> bytes:
    """Return an entry: packed claims with their signature. A list of 1,025 entries has at most 0.43 MB.

    :param scope: what they are for; the same claims count for nothing else
    """
    return packed + base64.b64decode(key.sign(scope + packed))


def verify(public_key: bytes, scope: bytes, entry: bytes) -> bool:
    """Return whether the owner of a key has signed an entry, see `sign`. The key is one that `signer_of` accepts."""
    signature = base64.b64encode(entry[-SIGNATURE_BYTES:])
    return _read_key(public_key).verify(scope + entry[:-SIGNATURE_BYTES], signature)


@functools.lru_cache(maxsize=4096)
def _read_key(public_key: bytes) -> RSAPublicKey:
    return RSAPublicKey.from_bytes(RSASignatureValidator._PUBLIC_KEY_RE.fullmatch(public_key)[1])  # pyright: ignore[reportOptionalSubscript]


def rank(step: int, peer_id: PeerID) -> bytes:
    """Return the sort key of a peer as leader of a step: the same at all peers, different for each step."""
    return hashlib.sha256(struct.pack("q", step) + peer_id.to_bytes()).digest()


def deal(step: int, listed: Mapping[PeerID, Claims], target_size: int | None) -> list[GroupInfo]:
    """Deal peers into groups of equal size, of at most `target_size`. Their `gathered` has the packed claims.

    All who have the same list come to the same groups, whose IDs no list with other peers or other claims has. The IDs
    begin alike: one mark of the step's history.

    :param listed: one of them has a bandwidth, or more
    """
    # Those that reduce nothing, such as clients, come last: each group has a peer that does
    dealt = sorted(listed, key=lambda peer_id: (listed[peer_id].bandwidth == 0, rank(step, peer_id)))
    num_reducers = sum(claims.bandwidth > 0 for claims in listed.values())
    num_groups = min(num_reducers, math.ceil(len(dealt) / (target_size or len(dealt))))
    content = MSGPackSerializer.dumps([step, *([peer_id.to_bytes(), listed[peer_id].pack()] for peer_id in dealt)])
    groups = []
    for index in range(num_groups):
        members = {peer_id: listed[peer_id] for peer_id in dealt[index::num_groups]}
        group_id = hashlib.sha256(content).digest()[:ID_BYTES] + hashlib.sha256(b"%d" % index + content).digest()
        gathered = tuple(claims.pack() for claims in _without_silent(members).values())
        groups.append(GroupInfo(group_id, tuple(members), gathered))
    return groups


def called_silent(members: Mapping[PeerID, Claims]) -> set[PeerID]:
    """Return the peers that most other members, two or more, call silent."""
    calls = Counter(tag for peer_id, claims in members.items() for tag in {*claims.silent} - {tag_of(peer_id)})
    return {peer_id for peer_id in members if 2 * max(calls[tag_of(peer_id)], 1) > max(2, len(members) - 1)}


def _without_silent(members: Mapping[PeerID, Claims]) -> dict[PeerID, Claims]:
    """Return the claims of a group with a bandwidth of 0 for those that are called silent.

    If nobody were left to reduce, the claims stay as they are.
    """
    silent = called_silent(members)
    if all(peer_id in silent or claims.bandwidth == 0 for peer_id, claims in members.items()):
        return dict(members)
    return {peer_id: replace(c, bandwidth=0.0) if peer_id in silent else c for peer_id, c in members.items()}
