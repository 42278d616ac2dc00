"""Records as trainers publish them on the DHT, for tests of the monitor."""

from peerstep.progress_record import PROTOCOL, PeerProgress


def metric(step, loss=10.0, mini_steps=2, samples=32, speed=1.5):
    return {"step": step, "samples_per_second": speed, "samples_accumulated": samples, "loss": loss,
            "mini_steps": mini_steps}  # fmt: skip


def entries(*records, times=()):
    """Return records of `metric` in the format of a history, with the times at which the steps ended, if given."""
    names = ("step", "samples_per_second", "samples_accumulated", "loss", "mini_steps")
    rows = [[record[name] for name in names] for record in records]
    return [[*row, time] for row, time in zip(rows, times, strict=True)] if times else rows


def heartbeat(now, epoch, samples=0, **fields):
    progress = PeerProgress(b"", epoch, epoch, samples, samples_per_second=2.5, time=now, reported_at=now)
    return {**progress.to_record(), "protocol": PROTOCOL, **fields}


def steps_of(reports):
    """Return the steps of reports or of parsed records."""
    return [report.step for report in reports]
