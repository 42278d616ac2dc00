"""Records as trainers publish them on the DHT, for tests of the monitor."""


def metric(step, loss=10.0, mini_steps=2, samples=32, speed=1.5):
    return {"step": step, "samples_per_second": speed, "samples_accumulated": samples, "loss": loss,
            "mini_steps": mini_steps}  # fmt: skip


def entries(*records):
    """Return records of `metric` in the format of a history."""
    names = ("step", "samples_per_second", "samples_accumulated", "loss", "mini_steps")
    return [[record[name] for name in names] for record in records]


def heartbeat(now, epoch, samples=0):
    return {"epoch": epoch, "samples_accumulated": samples, "samples_per_second": 2.5,
            "reported_at": now, "client_mode": False}  # fmt: skip


def steps_of(reports):
    """Return the steps of reports or of parsed records."""
    return [report.step for report in reports]
