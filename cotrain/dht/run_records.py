"""Records that peers publish in the DHT: schemas, validators, reading and writing."""

import pydantic.v1 as pydantic  # hivemind's schemas are pydantic v1 models, a v2 model raises
from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.timed_storage import ValueWithExpiration

from cotrain.dht.clock import run_time
from cotrain.dht.metrics_schema import (
    HISTORY_LENGTH,
    MAX_ROUNDS,
    MAX_STEP,
    Count,
    ExtensibleRecord,
    HistoryRow,
    LocalMetrics,
    Step,
)
from cotrain.dht.node import NUM_BUCKETS, PROGRESS
from cotrain.dht.records import ReadableValidator, RunValidator, SafeValidatorMixin, signer_of

logger = get_logger(__name__)


class MonitorStatus(pydantic.BaseModel):
    """Record that a monitor publishes for the trainers."""

    stores_checkpoints: pydantic.StrictBool
    checkpoint_step: pydantic.conint(strict=True, ge=-1, le=MAX_STEP)  # of the newest one on disk; -1 without one


class PeerInfo(ExtensibleRecord):
    """Record that a trainer publishes about itself."""

    username: pydantic.constr(strict=True, max_length=64)
    leaving: pydantic.StrictBool  # the trainer has completed its last step and waits for a monitor to save it


class RoundStatistics(ExtensibleRecord):
    """Record that a trainer publishes about its newest rounds with other trainers."""

    rounds: pydantic.conint(strict=True, ge=0, le=MAX_ROUNDS)
    # Those that averaged everything with every trainer of the step
    complete: pydantic.conint(strict=True, ge=0, le=MAX_ROUNDS)
    computed: Count | None = None  # samples that the trainer has computed for its newest MAX_ROUNDS global steps
    applied: Count | None = None  # those of them that counted in a step
    # Fraction of the time for which rounds ran lately
    averaging: pydantic.confloat(strict=True, ge=0.0, le=1.0) | None = None


class MetricSchema(pydantic.BaseModel):
    """The DHT keys of a run without the prefix; each holds a dictionary from the signer's public key to a record."""

    metrics: dict[BytesWithPublicKey, LocalMetrics]
    # The metrics of the newest steps, without field names
    history: dict[BytesWithPublicKey, pydantic.conlist(HistoryRow, max_items=HISTORY_LENGTH)]
    monitor: dict[BytesWithPublicKey, MonitorStatus]
    peers: dict[BytesWithPublicKey, PeerInfo]
    rounds: dict[BytesWithPublicKey, RoundStatistics]


# Checked by the reader (cotrain/averaging/progress.py), which warns about peers with another protocol number
ProgressSchema = pydantic.create_model(
    "ProgressSchema",
    **{f"{PROGRESS}.{bucket}": (dict[BytesWithPublicKey, dict | None], ...) for bucket in range(NUM_BUCKETS)},
)

# The priority (global step) of the state that a peer offers, None once the offer is withdrawn. The key is no Python
# identifier, so this schema is no class.
_Priority = pydantic.confloat(strict=True, ge=0.0, le=MAX_STEP) | Step | None
AveragerSchema = pydantic.create_model(
    "AveragerSchema", **{"state_averager.all_averagers": (dict[BytesWithPublicKey, _Priority], ...)}
)


class SignedConfig(pydantic.BaseModel):
    """Settings of a run with the organiser's signature, see cotrain/peer/run_config.py."""

    text: pydantic.StrictStr
    public_key: pydantic.StrictBytes
    signature: pydantic.StrictBytes


class ConfigSchema(pydantic.BaseModel):
    """The DHT key that names no run: a newcomer reads there which run it joins."""

    run_config: dict[BytesWithPublicKey, SignedConfig]


# Seconds to the expiration of a record, at most: what the flags allow, and some more for clocks that differ
MAX_LIFETIME = 5400.0
LIFETIMES = dict.fromkeys([*ProgressSchema.__fields__, "state_averager.all_averagers"], 180.0)


class SignatureValidator(SafeValidatorMixin, RSASignatureValidator):
    """Requires that a record under a subkey with a public key is signed with the private key."""


class RunSchemaValidator(SafeValidatorMixin, SchemaValidator):
    """Requires that a record under a key of the run matches its schema."""


def make_validators(run_id: str, private_key: RSAPrivateKey | None = None) -> tuple[list[RecordValidatorBase], bytes]:
    """Build the validators of a run's records.

    :param private_key: signs this peer's records; default: the key of the process
    :returns: the validators, and the subkey (owner tag with public key) of this peer's records
    """
    signature_validator = SignatureValidator(private_key)
    schemas = [RunSchemaValidator(schema, prefix=run_id) for schema in (MetricSchema, ProgressSchema, AveragerSchema)]
    schemas.append(RunSchemaValidator(ConfigSchema))
    keys = {key: name for schema in schemas for key, name in schema._key_id_to_field_name.items()}
    lifetimes = {key: LIFETIMES.get(name, MAX_LIFETIME) for key, name in keys.items()}
    validators = [ReadableValidator(), *schemas, signature_validator]
    return [RunValidator(validators, lifetimes)], signature_validator.local_public_key


def get_dictionary(dht: DHT, key: str, timeout: float = 10.0) -> dict:
    """Read the newest records under a key; log a warning if that fails.

    :param timeout: seconds. `dht.get` without a timeout never returns after the DHT process has died
    :returns: subkey -> ValueWithExpiration; empty if there are no records or reading failed
    """
    try:
        found = dht.get(key, latest=True, return_future=True).result(timeout=timeout)
    except Exception as error:
        logger.warning(f"Could not read {key} from the DHT: {error!r}")
        return {}
    return found.value if found is not None and isinstance(found.value, dict) else {}


def get_records(dht: DHT, key: str) -> dict[PeerID, ValueWithExpiration]:
    """Return the records of `get_dictionary` by the peers that have signed them."""
    return {signer_of(subkey): record for subkey, record in get_dictionary(dht, key).items()}


def store_record(dht: DHT, key: str, public_key: bytes, value: object, lifetime: float) -> None:
    """Publish a signed record under this peer's subkey for `lifetime` seconds, without waiting for the result."""
    dht.store(key, subkey=public_key, value=value, expiration_time=run_time() + lifetime, return_future=True)
