"""Workarounds for hivemind in reading DHT records: validators for any key, and a bound for its serializer.

They concern the DHT, but are in this package because `utils.py`, which defines the record schemas and combines the
validators, may not import `lib.peer`. docs/upgrading-hivemind.md lists what they replace.
"""

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgpack
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.utils import get_dht_time, get_logger

logger = get_logger(__name__)


class SafeValidatorMixin(RecordValidatorBase):
    """Mixin for hivemind's validators: refuses malformed keys and values on which they would raise."""

    def validate(self, record: DHTRecord) -> bool:
        try:
            return super().validate(record)
        except Exception as error:
            logger.debug(f"Refused a malformed record: {error!r}")
            return False


class ReadableValidator(RecordValidatorBase):
    """Refuses records that break their readers, under any key.

    hivemind unpacks values in a callback whose exceptions are lost. If one value under a key is not msgpack, `dht.get`
    of that key never returns: one byte stopped matchmaking and downloads for a day. A record without a subkey makes
    nodes refuse all records with a subkey under the same key until it expires.
    """

    MAX_DEPTH = 8  # nested lists and dictionaries in a value; a history, the deepest record, has 2

    def validate(self, record: DHTRecord) -> bool:
        try:
            subkey, value = (msgpack.unpackb(packed, ext_hook=_refuse) for packed in (record.subkey, record.value))
        except Exception as error:
            logger.debug(f"Refused a record that cannot be read: {error!r}")
            return False
        return isinstance(subkey, bytes | str) and _is_plain(value, self.MAX_DEPTH)

    @property
    def priority(self) -> int:
        return 7  # after the signature is stripped, since readers see values without it; before LimitValidator

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


class LimitValidator(RecordValidatorBase):
    """Refuses records that are too large or live too long, and too many subkeys per key, under any key.

    The bounds exceed the records of this project and the peers of any run. `max_subkeys` records of `max_bytes` fit
    into one answer of 4 MiB; otherwise no peer could read the dictionary.

    :param max_bytes: of value and subkey together, without the signature of 360 bytes
    :param max_lifetime: seconds from now to the expiration
    :param max_subkeys: of one key; the first ones are kept
    """

    MAX_KEYS = 1000  # keys whose subkeys are counted

    def __init__(self, max_bytes: int = 3600, max_lifetime: float = 86400.0, max_subkeys: int = 1000):
        self.max_bytes, self.max_lifetime, self.max_subkeys = max_bytes, max_lifetime, max_subkeys
        self._subkeys: dict[bytes, dict[bytes, float]] = {}  # key -> subkey -> expiration

    def validate(self, record: DHTRecord) -> bool:
        now = get_dht_time()
        if len(record.value) + len(record.subkey or b"") > self.max_bytes:
            return False
        if not record.expiration_time <= now + self.max_lifetime:  # also refuses NaN, which would disable expiration
            return False
        return not record.subkey or self._has_room(record, now)

    def _has_room(self, record: DHTRecord, now: float) -> bool:
        if record.key not in self._subkeys and len(self._subkeys) >= self.MAX_KEYS:
            self._subkeys.pop(next(iter(self._subkeys)))
        known = self._subkeys.setdefault(record.key, {})
        if record.subkey not in known and len(known) >= self.max_subkeys:
            for subkey in [subkey for subkey, expiration in known.items() if expiration < now]:
                del known[subkey]
            if len(known) >= self.max_subkeys:
                return False
        known[record.subkey] = max(record.expiration_time, known.get(record.subkey, 0.0))
        return True

    @property
    def priority(self) -> int:
        return 5  # after the signature check: a forged record must not take up room

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, LimitValidator)


class RunValidator(CompositeValidator):
    """All validators of a run's records, in hivemind's order, with a cache of the records found valid.

    A peer that reads a dictionary receives each record in it from each node that it asks. With 16 peers, validating
    them took 60 % of the DHT's time.
    """

    MAX_KNOWN = 8192  # records in the cache, 100 bytes each

    def __init__(self, validators: Iterable[RecordValidatorBase]):
        super().__init__(validators)
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        digest = _digest(record)
        if digest in self._known:
            self._known.move_to_end(digest)
            return True
        if not super().validate(record):
            return False
        self._known[digest] = None
        if len(self._known) > self.MAX_KNOWN:
            self._known.popitem(last=False)
        return True

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, RunValidator)


def _digest(record: DHTRecord) -> bytes:
    digest = hashlib.blake2b(struct.pack("d", record.expiration_time), digest_size=20)
    for part in (record.key, record.subkey or b"", record.value):
        digest.update(struct.pack("q", len(part)) + part)
    return digest.digest()


class BoundedExtensions:
    """Bounds the depth of nested extension types in hivemind's serializer.

    Each level takes some 20 KB of the C stack: 300 levels, which are 2 KB of untrusted data, end the process with a
    segmentation fault. A dictionary of records, the deepest value of this project, has 1 level.
    """

    MAX_DEPTH = 8

    def __init__(self, unpack: Callable[[int, bytes], object]):
        self._unpack, self._local = unpack, threading.local()

    def __call__(self, type_code: int, data: bytes) -> object:
        depth = getattr(self._local, "depth", 0)
        if depth >= self.MAX_DEPTH:
            raise ValueError("extension types are nested too deeply")
        self._local.depth = depth + 1
        try:
            return self._unpack(type_code, data)
        finally:
            self._local.depth = depth
