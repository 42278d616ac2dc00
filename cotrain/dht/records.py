"""DHT records of any kind: who has signed them, validators, and a bound for hivemind's serializer.

docs/upgrading-hivemind.md lists what they replace.
"""

import functools
import hashlib
import struct
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping

import msgpack
import multihash
from cryptography.hazmat.primitives import serialization
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import MSGPackSerializer, get_logger
from hivemind.utils.crypto import RSAPublicKey

from cotrain.dht.clock import run_time

logger = get_logger(__name__)


def peer_id_of(public_key: RSAPublicKey) -> PeerID:
    """Return the peer ID of a public key. See https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md."""
    der = public_key._public_key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    message = crypto_pb2.PublicKey(key_type=crypto_pb2.KeyType.RSA, data=der).SerializeToString()
    return PeerID(multihash.encode(hashlib.sha256(message).digest(), "sha2-256"))


@functools.lru_cache(maxsize=4096)
def signer_of(subkey: bytes) -> PeerID:
    """Return the peer that signs the records under a subkey. Each peer has one such subkey, as hivemind formats it.

    :raises ValueError: if the subkey is not exactly the owner tag of a public key of the kind that libp2p makes
    """
    tag = RSASignatureValidator._PUBLIC_KEY_RE.fullmatch(subkey) if isinstance(subkey, bytes) else None
    try:
        public_key = RSAPublicKey.from_bytes(tag[1])
    except Exception:  # cryptography raises various exceptions for untrusted bytes
        raise ValueError("the subkey is not a public key") from None
    numbers = public_key._public_key.public_numbers()
    # With an exponent as long as its key, an RSA key of 3072 bits takes 6.4 ms to refuse a record, and not 0.15 ms.
    if public_key.to_bytes() != tag[1] or (numbers.e, numbers.n.bit_length()) != (65537, 2048):
        raise ValueError("the public key is not in its usual form")
    return peer_id_of(public_key)


class SafeValidatorMixin(RecordValidatorBase):
    """Mixin for hivemind's validators: refuses malformed keys and values on which they would raise."""

    def validate(self, record: DHTRecord) -> bool:
        try:
            return super().validate(record)
        except Exception as error:
            logger.debug(f"Refused a malformed record: {error!r}")
            return False


class ReadableValidator(RecordValidatorBase):
    """Refuses values that break their readers.

    hivemind unpacks values in a callback whose exceptions are lost. If one value under a key is not msgpack, `dht.get`
    of that key never returns: one byte stopped matchmaking and downloads for a day.
    """

    MAX_DEPTH = 8  # nested lists and dictionaries in a value; a history, the deepest record, has 2

    def validate(self, record: DHTRecord) -> bool:
        try:
            return _is_plain(msgpack.unpackb(record.value, ext_hook=_refuse), self.MAX_DEPTH)
        except Exception as error:
            logger.debug(f"Refused a record that cannot be read: {error!r}")
            return False

    @property
    def priority(self) -> int:
        return 7  # after the signature is stripped, since readers see values without it

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, ReadableValidator)


def _refuse(type_code: int, _data: bytes) -> object:
    raise ValueError(f"unknown extension type {type_code}")


def _is_plain(value: object, depth: int) -> bool:
    """Whether a value is None, a number, text, bytes, or lists and dictionaries of these, at most `depth` deep."""
    if isinstance(value, list):
        children = value
    elif isinstance(value, dict):
        children = [*value.keys(), *value.values()]
    else:
        return value is None or isinstance(value, bool | int | float | str | bytes)
    return depth > 0 and all(_is_plain(child, depth - 1) for child in children)


class RunValidator(CompositeValidator):
    """All validators of a run's records, in hivemind's order, after cheap checks, with bounds and a cache.

    Only the keys of the run are stored, and of each signer one record per key, so a stranger can neither fill a node's
    memory nor take the place of others. The owner tag is required under any key: hivemind accepts records without one,
    and a record without a subkey makes nodes refuse all records with a subkey under its key until it expires.

    A reader receives each record from each node that it asks: with 16 peers, validating took 60 % of the DHT's time.
    `MAX_SUBKEYS` records of the largest size fit into one answer of 4 MiB; otherwise no peer could read the
    dictionary. Records are counted after all checks: refused ones take up no room.

    :param lifetimes: the keys -> seconds from now to the expiration of a record, at most
    """

    MAX_BYTES = 3600  # of value and subkey together, without the signature
    MAX_SIGNATURE_BYTES = 400  # it has 360
    MAX_KNOWN = 8192  # records in the cache, 100 bytes each
    MAX_SUBKEYS = 1000  # of one key; the first ones are kept

    def __init__(self, validators: Iterable[RecordValidatorBase], lifetimes: Mapping[bytes, float]):
        super().__init__(validators)
        self._lifetimes = lifetimes
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._subkeys: dict[bytes, dict[bytes, float]] = defaultdict(dict)  # key -> subkey -> expiration

    def validate(self, record: DHTRecord) -> bool:
        if not self._is_bounded(record):
            return False
        digest = _digest(record)
        if digest in self._known:
            self._known.move_to_end(digest)
            return True
        if not (self._has_signer(record) and super().validate(record) and self._has_room(record)):
            return False
        self._known[digest] = None
        if len(self._known) > self.MAX_KNOWN:
            self._known.popitem(last=False)
        return True

    def _is_bounded(self, record: DHTRecord) -> bool:
        if len(record.value) + len(record.subkey or b"") > self.MAX_BYTES + self.MAX_SIGNATURE_BYTES:
            return False
        lifetime = self._lifetimes.get(record.key)
        return lifetime is not None and record.expiration_time <= run_time() + lifetime  # false for NaN

    def _has_signer(self, record: DHTRecord) -> bool:
        try:
            subkey = msgpack.unpackb(record.subkey, ext_hook=_refuse)
            # msgpack has several forms of the same bytes: a signer would have as many places.
            return record.subkey == MSGPackSerializer.dumps(subkey) and bool(signer_of(subkey))
        except Exception as error:
            logger.debug(f"Refused a record without a signer: {error!r}")
            return False

    def _has_room(self, record: DHTRecord) -> bool:
        known = self._subkeys[record.key]
        if record.subkey not in known and len(known) >= self.MAX_SUBKEYS:
            now = run_time()
            for subkey in [subkey for subkey, expiration in known.items() if expiration < now]:
                del known[subkey]
            if len(known) >= self.MAX_SUBKEYS:
                return False
        known[record.subkey] = max(record.expiration_time, known.get(record.subkey, 0.0))
        return True

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, RunValidator)


def _digest(record: DHTRecord) -> bytes:
    digest = hashlib.blake2b(struct.pack("d", record.expiration_time), digest_size=20)
    for part in (record.key, record.subkey or b"", record.value):
        digest.update(struct.pack("q", len(part)) + part)
    return digest.digest()


class BoundedExtensions:
    """Bounds the depth of nested extension types in hivemind's serializer, and refuses unknown ones.

    Each level takes some 20 KB of the C stack: 300 levels, in 2 KB of untrusted data, end the process with a
    segmentation fault. A dictionary of records has 1 level.
    """

    MAX_DEPTH = 8

    def __init__(self, unpack: Callable[[int, bytes], object]):
        self._unpack, self._local = unpack, threading.local()

    def __call__(self, type_code: int, data: bytes) -> object:
        depth = getattr(self._local, "depth", 0)
        if depth >= self.MAX_DEPTH:
            raise ValueError("extension types are nested too deeply")
        if type_code not in (*MSGPackSerializer._ext_type_codes, MSGPackSerializer._TUPLE_EXT_TYPE_CODE):
            return _refuse(type_code, data)  # hivemind logs a warning for each: 1.4 million in a message of 4 MiB
        self._local.depth = depth + 1
        try:
            return self._unpack(type_code, data)
        finally:
            self._local.depth = depth
