"""The records that peers publish in the DHT, and their validators."""

import pydantic.v1 as pydantic  # hivemind's schemas are pydantic v1 models, a v2 model raises
from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.dht.validation import RecordValidatorBase
from hivemind.utils import get_dht_time, get_logger
from hivemind.utils.crypto import RSAPrivateKey

from lib.averaging.records import LimitValidator, ReadableValidator, RefusesWhatItCannotRead, RunValidator
from lib.common.metrics_schema import (
    HISTORY_LENGTH,
    MAX_COUNT,
    MAX_STEP,
    Count,
    HistoryRow,
    LocalMetrics,
    Rate,
    Step,
)

logger = get_logger(__name__)

_Share = pydantic.confloat(strict=True, ge=0.0, le=1.0)


class MonitorStatus(pydantic.BaseModel):
    """What a monitor tells the trainers. `checkpoint_step`: the newest step that it has on disk, -1 if none."""

    stores_checkpoints: pydantic.StrictBool
    checkpoint_step: pydantic.conint(strict=True, ge=-1, le=MAX_STEP)


class PeerInfo(pydantic.BaseModel):
    """What a trainer tells of itself. `leaving`: it has made its last step and waits for a monitor to save it.

    `target_batch_size`: samples of a global step; may be missing.
    """

    username: pydantic.constr(strict=True, max_length=64)
    leaving: pydantic.StrictBool
    target_batch_size: pydantic.conint(strict=True, ge=1, le=MAX_COUNT) | None = None

    def dict(self, **options) -> dict:
        """The fields that are set: a validated record must come out as it went in, without the optional field, too."""
        return super().dict(**{**options, "exclude_unset": True})


class Evaluation(pydantic.BaseModel):
    """What an evaluator found for the parameters of a global step, on `samples` samples that nobody trains on. Values
    that the objective does not have are None."""

    step: Step
    samples: Count
    loss: Rate
    perplexity: Rate | None
    mlm_accuracy: _Share | None
    sop_accuracy: _Share | None


class MetricSchema(pydantic.BaseModel):
    """The keys of a run, without its prefix: each a dictionary from the signer's public key to a record."""

    metrics: dict[BytesWithPublicKey, LocalMetrics]
    # The metrics of the newest steps, without their names
    history: dict[BytesWithPublicKey, pydantic.conlist(HistoryRow, max_items=HISTORY_LENGTH)]
    monitor: dict[BytesWithPublicKey, MonitorStatus]
    peers: dict[BytesWithPublicKey, PeerInfo]
    evaluation: dict[BytesWithPublicKey, Evaluation]
    # Checked where it is read, see lib/averaging/progress.py: peers of another protocol shall be told so
    training_progress: dict[BytesWithPublicKey, dict | None]


# What hivemind's averagers declare: whether a peer looks for a group, and the priority (its step) of the state that it
# offers, None if it no longer does. Their keys are no names of Python's, hence no class.
_Priority = pydantic.confloat(strict=True, ge=0.0, le=MAX_STEP) | Step | None
AveragerSchema = pydantic.create_model(
    "AveragerSchema",
    **{
        "state_averager.all_averagers": (dict[pydantic.StrictBytes, _Priority], ...),
    },
)


class SignatureValidator(RefusesWhatItCannotRead, RSASignatureValidator):
    """A record under a subkey with a public key must be signed with the private one."""


class RunSchemaValidator(RefusesWhatItCannotRead, SchemaValidator):
    """A record under a key of the run must look like MetricSchema or AveragerSchema says."""


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
