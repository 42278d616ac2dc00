"""What any peer needs of the DHT: the records that peers publish and their validators, starting a peer, its addresses.

Knows nothing of models.
"""

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable

import msgpack
import pydantic.v1 as pydantic  # hivemind's schemas are pydantic v1 models, a v2 model raises
from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer, get_dht_time, get_logger
from hivemind.utils.crypto import RSAPrivateKey

logger = get_logger(__name__)

# A trainer's history holds as many steps as fit a record of 4 KiB, the most that hivemind's control pipe takes in one
# piece when several threads write to it: 64 entries of about 30 bytes, its keys and its signature.
HISTORY_LENGTH = 64

_Step = pydantic.conint(strict=True, ge=0, lt=2**31)
_Count = pydantic.conint(strict=True, ge=0, le=10**9)
_Rate = pydantic.confloat(strict=True, ge=0.0, le=1e9)  # bounds also refuse NaN and infinity
_Share = pydantic.confloat(strict=True, ge=0.0, le=1.0)
_Sum = pydantic.confloat(strict=True, ge=-1e9, le=1e9)


class LocalMetrics(pydantic.BaseModel):
    """What a trainer reports after each global step; the record of hivemind's own ALBERT example.

    `step`: the global step that was reached; `samples_accumulated`: samples that this peer contributed to it;
    `loss`: the sum of the losses of `mini_steps` micro-batches.
    """

    step: _Step
    samples_per_second: _Rate
    samples_accumulated: _Count
    loss: _Sum
    mini_steps: _Count


class MonitorStatus(pydantic.BaseModel):
    """What a monitor tells the trainers. `checkpoint_step`: the newest step that it has on disk, -1 if none."""

    stores_checkpoints: pydantic.StrictBool
    checkpoint_step: pydantic.conint(strict=True, ge=-1, lt=2**31)


class PeerInfo(pydantic.BaseModel):
    """What a trainer tells of itself. `leaving`: it has made its last step and waits for a monitor to save it.

    `target_batch_size`: samples of a global step; may be missing.
    """

    username: pydantic.constr(strict=True, max_length=64)
    leaving: pydantic.StrictBool
    target_batch_size: pydantic.conint(strict=True, ge=1, le=10**9) | None = None

    def dict(self, **options) -> dict:
        """The fields that are set: a validated record must come out as it went in, without the optional field, too."""
        return super().dict(**{**options, "exclude_unset": True})


class Evaluation(pydantic.BaseModel):
    """What an evaluator found for the parameters of a global step, on `samples` samples that nobody trains on. Values
    that the objective does not have are None."""

    step: _Step
    samples: _Count
    loss: _Rate
    perplexity: _Rate | None
    mlm_accuracy: _Share | None
    sop_accuracy: _Share | None


class MetricSchema(pydantic.BaseModel):
    """The keys of a run, without its prefix: each a dictionary from the signer's public key to a record."""

    metrics: dict[BytesWithPublicKey, LocalMetrics]
    # [step, samples_per_second, samples_accumulated, loss, mini_steps] of the newest steps
    history: dict[
        BytesWithPublicKey,
        pydantic.conlist(
            pydantic.conlist(pydantic.StrictInt | pydantic.StrictFloat, min_items=5, max_items=5),
            max_items=HISTORY_LENGTH,
        ),
    ]
    monitor: dict[BytesWithPublicKey, MonitorStatus]
    peers: dict[BytesWithPublicKey, PeerInfo]
    evaluation: dict[BytesWithPublicKey, Evaluation]
    # Checked where it is read, see lib/averaging/progress.py: peers of another protocol shall be told so
    training_progress: dict[BytesWithPublicKey, dict | None]


# What hivemind's averagers declare: whether a peer looks for a group, and the priority (its step) of the state that it
# offers, None if it no longer does. Their keys are no names of Python's, hence no class.
_Priority = pydantic.confloat(strict=True, ge=0.0, lt=2**31) | _Step | None
AveragerSchema = pydantic.create_model(
    "AveragerSchema",
    **{
        "state_averager.all_averagers": (dict[pydantic.StrictBytes, _Priority], ...),
    },
)


class RefusesWhatItCannotRead(RecordValidatorBase):
    """hivemind's validators raise on some malformed keys and values instead of refusing them."""

    def validate(self, record: DHTRecord) -> bool:
        try:
            return super().validate(record)
        except Exception as error:
            logger.debug(f"Refused a malformed record: {error!r}")
            return False


class SignatureValidator(RefusesWhatItCannotRead, RSASignatureValidator):
    """A record under a subkey with a public key must be signed with the private one."""


class RunSchemaValidator(RefusesWhatItCannotRead, SchemaValidator):
    """A record under a key of the run must look like MetricSchema or AveragerSchema says."""


class ReadableValidator(RecordValidatorBase):
    """Refuses records that break their readers, under any key.

    hivemind unpacks values in a callback whose exceptions are lost: with one value that is no msgpack under a key,
    `dht.get` of that key never returns. One byte stopped matchmaking and downloads for a day. A record without a
    subkey makes nodes refuse all records with one under the same key for as long as it lives.
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
        return 7  # sees values as readers do, without their signature, and before LimitValidator counts them

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, ReadableValidator)


def _refuse(type_code: int, _data: bytes) -> object:
    raise ValueError(f"extension type {type_code}, which no record has")


def _is_plain(value: object, depth: int) -> bool:
    """Whether a value consists of numbers, texts and at most `depth` nested lists and dictionaries of them."""
    if isinstance(value, list):
        children = value
    elif isinstance(value, dict):
        children = [*value.keys(), *value.values()]
    else:
        return value is None or isinstance(value, bool | int | float | str | bytes)
    return depth > 0 and all(_is_plain(child, depth - 1) for child in children)


class _BoundedExtensions:
    """Stops hivemind's serializer from unpacking extension types inside of each other without end.

    Each level takes some 20 KB of the C stack: 2 KB from a stranger, 300 levels, end the process with a segmentation
    fault. A dictionary of records, the deepest of ours, has 1.
    """

    MAX_DEPTH = 8

    def __init__(self, unpack):
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


MSGPackSerializer._decode_ext_types = staticmethod(_BoundedExtensions(MSGPackSerializer._decode_ext_types))


class LimitValidator(RecordValidatorBase):
    """Refuses records that are larger or meant to live longer than any of ours, under whatever key, and more subkeys
    than any run has peers: what a dictionary holds must fit into one answer of 4 MiB, or nobody can read it.

    :param max_subkeys: of one key; whoever is there first stays
    """

    MAX_KEYS = 1000  # keys whose subkeys are counted

    def __init__(self, max_bytes: int = 8192, max_lifetime: float = 86400.0, max_subkeys: int = 1000):
        self.max_bytes, self.max_lifetime, self.max_subkeys = max_bytes, max_lifetime, max_subkeys
        self._subkeys: dict[bytes, dict[bytes, float]] = {}  # key -> subkey -> expiration

    def validate(self, record: DHTRecord) -> bool:
        now = get_dht_time()
        if len(record.value) + len(record.subkey or b"") > self.max_bytes:
            return False
        if not record.expiration_time <= now + self.max_lifetime:  # NaN, too, after which nothing expires any more
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
        return 5  # after the signature: one that is forged must not take up room

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, LimitValidator)


class RunValidator(CompositeValidator):
    """All validators of a run's records, in hivemind's order. Remembers which records it has found valid.

    A peer that reads a dictionary receives each record in it from each node that it asks. With 16 peers, checking
    them took 60 % of the DHT's time.
    """

    MAX_KNOWN = 8192  # of 100 bytes each

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


def make_validators(run_id: str, private_key: RSAPrivateKey | None = None) -> tuple[list[RecordValidatorBase], bytes]:
    """The validators of a run's records, and the subkey (owner tag with public key) that our own are signed under."""
    signature_validator = SignatureValidator(private_key)
    schemas = [RunSchemaValidator(schema, prefix=run_id) for schema in (MetricSchema, AveragerSchema)]
    validators = [LimitValidator(), ReadableValidator(), *schemas, signature_validator]
    return [RunValidator(validators)], signature_validator.local_public_key


def get_dictionary(dht: DHT, key: str, timeout: float = 10.0) -> dict:
    """The newest records under a key: subkey -> ValueWithExpiration. Empty if there are none, or in case of trouble.

    The wait is bounded: `dht.get` alone never returns after the DHT process has died.
    """
    try:
        found = dht.get(key, latest=True, return_future=True).result(timeout=timeout)
    except Exception as error:
        logger.warning(f"Could not read {key} from the DHT: {error!r}")
        return {}
    return found.value if found is not None and isinstance(found.value, dict) else {}


def store_record(dht: DHT, key: str, public_key: bytes, value: object, lifetime: float) -> None:
    """Publish a signed record without waiting for the outcome."""
    dht.store(key, subkey=public_key, value=value, expiration_time=get_dht_time() + lifetime, return_future=True)
