"""DHT records: who has signed them, validators, reading and writing, and a bound for hivemind's serializer.

docs/upgrading-hivemind.md lists what they replace.
"""

import functools
import hashlib
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from types import MappingProxyType

import msgpack
import multihash
import pydantic.v1 as pydantic  # hivemind's schemas are pydantic v1 models, a v2 model raises
from cryptography.hazmat.primitives import serialization
from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import MPFuture, MSGPackSerializer, get_logger
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.peer.clock import run_time
from peerstep.peer.node import NUM_BUCKETS, PROGRESS, bucket_of
from peerstep.reports.marks import MAX_STEP

logger = get_logger(__name__)

READ_TIMEOUT = 10.0  # seconds
MAX_DEPTH = 8  # nested lists and dictionaries in a value; a history, the deepest record, has 2; or extension types


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
    if not isinstance(subkey, bytes) or (tag := RSASignatureValidator._PUBLIC_KEY_RE.fullmatch(subkey)) is None:
        raise ValueError("the subkey is not a public key")
    try:
        public_key = RSAPublicKey.from_bytes(tag[1])
    except Exception:  # cryptography raises various exceptions for untrusted bytes
        raise ValueError("the subkey is not a public key") from None
    numbers = public_key._public_key.public_numbers()
    # With an exponent as long as its key, an RSA key of 3072 bits takes 6.4 ms to refuse a record, and not 0.15 ms.
    if public_key.to_bytes() != tag[1] or (numbers.e, numbers.n.bit_length()) != (65537, 2048):
        raise ValueError("the public key is not in its usual form")
    return peer_id_of(public_key)


def is_readable(value: bytes) -> bool:
    """Whether readers can unpack a value, without its signature. Raises various exceptions if it is not msgpack.

    hivemind unpacks values in a callback whose exceptions are lost. If one value under a key is not msgpack, `dht.get`
    of that key never returns: one byte stopped matchmaking and downloads for a day.
    """
    return _is_plain(msgpack.unpackb(value, ext_hook=_refuse), MAX_DEPTH)


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
    dictionary. Records are counted after all checks: refused ones take up no room. Reports are smaller, and under one
    key: 285 signers of large ones under each key made all answers too large.

    :param lifetimes: the keys -> seconds from now to the expiration of a record, at most
    :param buckets: the keys of reports -> their numbers, see RunNode
    """

    MAX_BYTES = 3600  # of value and subkey together, without the signature
    MAX_REPORT_BYTES = 1024 + 400  # of a report, which has 400, and its subkey, which has 392
    MAX_SIGNATURE_BYTES = 400  # it has 360
    MAX_KNOWN = 8192  # records in the cache, 100 bytes each
    MAX_SUBKEYS = 1000  # of one key; the first ones are kept

    def __init__(
        self,
        validators: Iterable[RecordValidatorBase],
        lifetimes: Mapping[bytes, float],
        buckets: Mapping[bytes, int] = MappingProxyType({}),
    ):
        super().__init__(validators)
        self._lifetimes, self._buckets = lifetimes, buckets
        self.known: OrderedDict[bytes, None] = OrderedDict()
        self.subkeys: dict[bytes, dict[bytes, float]] = defaultdict(dict)  # key -> subkey -> expiration

    def validate(self, record: DHTRecord) -> bool:
        try:
            return self._is_valid(record)
        except Exception as error:  # also of hivemind's validators, for malformed keys and values
            logger.debug(f"Refused a malformed record: {error!r}")
            return False

    def _is_valid(self, record: DHTRecord) -> bool:
        end = run_time() + self._lifetimes.get(record.key, -math.inf)
        num_bytes = len(record.value) + len(record.subkey or b"")
        most = self.MAX_REPORT_BYTES if record.key in self._buckets else self.MAX_BYTES
        if num_bytes > most + self.MAX_SIGNATURE_BYTES or not -math.inf < record.expiration_time <= end:
            return False
        digest = hashlib.blake2b(MSGPackSerializer.dumps(astuple(record)), digest_size=20).digest()
        if digest in self.known:
            self.known.move_to_end(digest)
            return True
        subkey = msgpack.unpackb(record.subkey, ext_hook=_refuse)
        # msgpack has several forms of the same bytes: a signer would have as many places.
        if record.subkey != MSGPackSerializer.dumps(subkey) or not signer_of(subkey):
            return False
        if self._buckets.get(record.key, bucket_of(subkey)) != bucket_of(subkey):
            return False
        if not (is_readable(self.strip_value(record)) and super().validate(record) and self._has_room(record)):
            return False
        self.known[digest] = None
        if len(self.known) > self.MAX_KNOWN:
            self.known.popitem(last=False)
        return True

    def _has_room(self, record: DHTRecord) -> bool:
        known = self.subkeys[record.key]
        if record.subkey not in known and len(known) >= self.MAX_SUBKEYS:
            now = run_time()
            known = self.subkeys[record.key] = {other: end for other, end in known.items() if end >= now}
            if len(known) >= self.MAX_SUBKEYS:
                return False
        known[record.subkey] = max(record.expiration_time, known.get(record.subkey, 0.0))
        return True


class BoundedExtensions(threading.local):
    """Bounds the depth of nested extension types in hivemind's serializer, and refuses unknown ones.

    Each level takes some 20 KB of the C stack: 300 levels, in 2 KB of untrusted data, end the process with a
    segmentation fault. A dictionary of records has 1 level.
    """

    depth = 0  # of the type that is being unpacked, in each thread

    def __init__(self, unpack: Callable[[int, bytes], object]):
        self._unpack = unpack

    def __call__(self, type_code: int, data: bytes) -> object:
        if self.depth >= MAX_DEPTH:
            raise ValueError("extension types are nested too deeply")
        if type_code not in (*MSGPackSerializer._ext_type_codes, MSGPackSerializer._TUPLE_EXT_TYPE_CODE):
            return _refuse(type_code, data)  # hivemind logs a warning for each: 1.4 million in a message of 4 MiB
        self.depth += 1
        try:
            return self._unpack(type_code, data)
        finally:
            self.depth -= 1


# The priority (global step) of the state that a peer offers, None once the offer is withdrawn
_Priority = (
    pydantic.confloat(strict=True, ge=0.0, le=MAX_STEP) | pydantic.conint(strict=True, ge=0, le=MAX_STEP) | None
)
_FIELDS = {
    # Checked by the reader (peerstep/progress/tracker.py), which warns about peers with another protocol number
    **dict.fromkeys((f"{PROGRESS}.{bucket}" for bucket in range(NUM_BUCKETS)), dict[BytesWithPublicKey, dict | None]),
    "state_averager.all_averagers": dict[BytesWithPublicKey, _Priority],
}
RunSchema = pydantic.create_model("RunSchema", **{name: (kind, ...) for name, kind in _FIELDS.items()})  # pyright: ignore[reportCallIssue, reportArgumentType]

# Seconds to the expiration of a record, of these and of a caller's schemas, at most: what the flags allow, and some
# more for clocks that differ
MAX_LIFETIME, MAX_LIFETIME_OF_OTHERS = 180.0, 5400.0


def build_validators(
    prefix: str, private_key: RSAPrivateKey | None = None, schemas: Sequence[SchemaValidator] = ()
) -> tuple[list[RecordValidatorBase], bytes]:
    """Build the validators of a run's records.

    :param prefix: of the keys: the name of the run
    :param private_key: signs this peer's records; default: the key of the process
    :param schemas: of the caller's own records. Records under other keys are refused
    :returns: the validators, and the subkey (owner tag with public key) of this peer's records
    """
    signatures = RSASignatureValidator(private_key)
    own = SchemaValidator(RunSchema, prefix=prefix)
    lifetimes = {key: MAX_LIFETIME_OF_OTHERS for schema in schemas for key in schema._key_id_to_field_name}
    lifetimes |= dict.fromkeys(own._key_id_to_field_name, MAX_LIFETIME)
    buckets = {DHTID.generate(f"{prefix}_{PROGRESS}.{bucket}").to_bytes(): bucket for bucket in range(NUM_BUCKETS)}
    return [RunValidator([own, *schemas, signatures], lifetimes, buckets)], signatures.local_public_key


def get_dictionary(dht: DHT, key: str) -> dict:
    """Read the newest records under a key; log a warning if that fails, or takes longer than READ_TIMEOUT.

    :returns: subkey -> ValueWithExpiration; empty if there are no records or reading failed
    """
    try:
        # Without a timeout this never returns after the DHT process has died.
        found = dht.get(key, latest=True, return_future=True).result(READ_TIMEOUT)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    except Exception as error:
        logger.warning(f"Could not read {key} from the DHT: {error!r}")
        return {}
    return found.value if found is not None and isinstance(found.value, dict) else {}


def get_records(dht: DHT, key: str) -> dict[PeerID, ValueWithExpiration]:
    """Return the records of `get_dictionary` by the peers that have signed them."""
    return {signer_of(subkey): record for subkey, record in get_dictionary(dht, key).items()}


MAX_JUMP = 30.0  # seconds
_expirations: dict[tuple[str, bytes], float] = {}  # of the newest record of this process under a key and a subkey


def store_record(dht: DHT, key: str, public_key: bytes, value: object, lifetime: float) -> MPFuture:
    """Publish a signed record under this peer's subkey for `lifetime` seconds. Does not wait for the result.

    It expires after the one before. Nodes would refuse it otherwise, for as long as this machine's clock is behind
    after a jump. A lifetime that is shorter than the last one by more than MAX_JUMP is meant.
    """
    expires, last = run_time() + lifetime, _expirations.get((key, public_key), 0.0)
    if last - MAX_JUMP < expires <= last:
        expires = last + 1e-3
    _expirations[key, public_key] = expires
    return dht.store(key, value, expires, subkey=public_key, return_future=True)  # pyright: ignore[reportReturnType]
