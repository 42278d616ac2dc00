"""Records of trainers and monitors in the DHT: their schemas. Those of rounds are in peerstep/reports/records.py."""

import pydantic.v1 as pydantic  # hivemind's schemas are pydantic v1 models, a v2 model raises
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator

from cotrain.common.names import SHORT
from cotrain.dht.metrics_schema import HISTORY_LENGTH, Count, ExtensibleRecord, Sum, read_row
from peerstep.reports.marks import MAX_STEP
from peerstep.reports.progress_report import MAX_ROUNDS

MAX_MEMBERS = 32  # of the newest rounds, in a record; of a larger group some, at random


class MonitorStatus(pydantic.BaseModel):
    """Record that a monitor publishes for the trainers."""

    stores_checkpoints: pydantic.StrictBool
    checkpoint_step: pydantic.conint(strict=True, ge=-1, le=MAX_STEP)  # of the newest one on disk; -1 without one


class TrainerRecord(ExtensibleRecord):
    """Record that a trainer publishes after each global step, about itself and its newest steps and rounds."""

    username: pydantic.constr(strict=True, max_length=64)
    leaving: pydantic.StrictBool  # the trainer has completed its last step and waits for a monitor to save it
    history: pydantic.conlist(list, max_items=HISTORY_LENGTH)  # the metrics of the newest steps, without field names
    rounds: pydantic.conint(strict=True, ge=0, le=MAX_ROUNDS)  # newest rounds with other trainers
    # Those that averaged everything with every trainer of the step
    complete: pydantic.conint(strict=True, ge=0, le=MAX_ROUNDS)
    computed: Count  # samples that the trainer has computed for its newest MAX_ROUNDS global steps
    applied: Count  # those of them that counted in a step
    # Fraction of the time for which rounds ran lately
    averaging: pydantic.confloat(strict=True, ge=0.0, le=1.0) | None = None
    # Ends of the IDs of peers that gave samples in its newest rounds, see `named_by_others` of aggregation.py
    members: pydantic.conlist(pydantic.constr(strict=True, max_length=SHORT), max_items=MAX_MEMBERS) | None = None
    paused: pydantic.StrictBool | None = None
    # On the trainer's own held-out samples: of the initial weights, and of a recent step
    own_base_loss: Sum | None = None
    own_loss: Sum | None = None

    @pydantic.validator("history", each_item=True)
    def check_row(cls, row: list) -> list:
        read_row(row)
        return row


class RecordSchema(pydantic.BaseModel):
    """The DHT keys of a run without the prefix; each holds a dictionary from the signer's public key to a record."""

    trainers: dict[BytesWithPublicKey, TrainerRecord]
    monitor: dict[BytesWithPublicKey, MonitorStatus]


class SignedConfig(pydantic.BaseModel):
    """Settings of a run with the organiser's signature, see cotrain/peer/signed_settings.py."""

    text: pydantic.StrictStr
    public_key: pydantic.StrictBytes
    signature: pydantic.StrictBytes


class ConfigSchema(pydantic.BaseModel):
    """The DHT key that names no run: a newcomer reads there which run it joins."""

    run_config: dict[BytesWithPublicKey, SignedConfig]


def record_schemas(run_id: str) -> list[SchemaValidator]:
    """Return the schemas of the library's records. Scripts add theirs, see utils.py."""
    return [SchemaValidator(RecordSchema, prefix=run_id), SchemaValidator(ConfigSchema)]
