"""What any peer needs of the DHT: the records that peers publish and their validators, starting a peer, its addresses.

Knows nothing of models.
"""

import pydantic.v1 as pydantic  # hivemind's schemas are pydantic v1 models, a v2 model raises
from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.dht.validation import RecordValidatorBase
from hivemind.utils import get_dht_time, get_logger
from hivemind.utils.crypto import RSAPrivateKey

from lib.averaging.records import LimitValidator, ReadableValidator, RefusesWhatItCannotRead, RunValidator

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
