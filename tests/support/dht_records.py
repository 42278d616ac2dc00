"""Records as trainers publish them on the DHT, for tests of the monitor."""

from hivemind.dht.validation import RecordValidatorBase
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.timed_storage import ValueWithExpiration

import utils
from cotrain.monitoring.aggregation import PeerStep
from peerstep.reports.progress_report import PROTOCOL, PeerProgress
from peerstep.reports.records import build_validators


def make_validators(run_id: str, private_key: RSAPrivateKey | None = None) -> tuple[list[RecordValidatorBase], bytes]:
    """Build the validators of all records of a run, see `build_validators`."""
    return build_validators(run_id, private_key, utils.make_validators(run_id))


def metric(step, loss=10.0, mini_steps=2, samples=32, speed=1.5):
    return {"step": step, "samples_per_second": speed, "samples_accumulated": samples, "loss": loss,
            "mini_steps": mini_steps}  # fmt: skip


def entries(*records, times=()):
    """Return records of `metric` in the format of a history, with the times at which the steps ended, if given."""
    names = ("step", "samples_per_second", "samples_accumulated", "loss", "mini_steps")
    rows = [[record[name] for name in names] for record in records]
    return [[*row, time] for row, time in zip(rows, times, strict=True)] if times else rows


def trainer_record(*history, **fields):
    """Return the record of a trainer whose history has these entries."""
    rounds = {"rounds": 0, "complete": 0, "computed": 0, "applied": 0}
    return {"username": "", "leaving": False, "history": list(history), **rounds, **fields}


def found(values, expires=2e9):
    """Return records as `get_records` does."""
    return {key: ValueWithExpiration(value, expires) for key, value in values.items()}


def peer_step(peer, step=1, samples=32):
    return PeerStep(peer, step, samples, metric(step, samples=samples) | {"time": None})


def heartbeat(now, epoch, samples=0, **fields):
    progress = PeerProgress(b"", epoch, epoch, samples, samples_per_second=2.5, time=now, reported_at=now)
    return {**progress.to_record(), "protocol": PROTOCOL, **fields}


def snapshot(now, metrics, history=None, progress=None, members=None):
    """Return what `MetricsAggregator.update` is given.

    :param metrics: peer -> `metric` of its newest step, perhaps with the expiration time of its record
    :param history: peer -> `entries` of the steps before, and perhaps this one
    :param members: peer -> names of the members of its rounds; default: trainers that name nobody
    :param progress: peer -> heartbeat, or None for a goodbye. Without any, each peer with metrics has one
    """
    metrics = {peer: record if hasattr(record, "value") else ValueWithExpiration(record, 2e9)
               for peer, record in metrics.items()}  # fmt: skip
    trainers = {}
    for peer, (newest, expires) in metrics.items():
        rows, (last,) = (history or {}).get(peer, []), entries(newest)
        rows = rows if rows and rows[-1][: len(last)] == last else [*rows, last]
        trainers[peer] = ValueWithExpiration(trainer_record(*rows, members=(members or {}).get(peer, [])), expires)
    progress = progress or {peer: heartbeat(now, newest["step"]) for peer, (newest, _) in metrics.items()}
    return now, trainers, found(progress)


def steps_of(reports):
    """Return the steps of reports."""
    return [report.step for report in reports]
