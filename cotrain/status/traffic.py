"""Traffic of this machine while a trainer runs, which some connections bill by the month."""

import time
from pathlib import Path
from typing import Any

import psutil

from cotrain.common.flags import format_size
from cotrain.common.json_file import JsonFile

MINUTE = 60.0  # seconds; a trainer ends with as much traffic left as its busiest minute took
LEAST_SECONDS = 600.0  # before the traffic of an hour is stated


def count_bytes() -> int:
    """Return the bytes that the network interfaces of this machine have sent and received; not those to itself."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(c.bytes_sent + c.bytes_recv for name, c in counters.items() if not name.startswith("lo"))


def _this_month() -> str:
    return time.strftime("%Y-%m")


def _parse(kept: Any) -> tuple[str, int]:
    return str(kept["month"]), int(kept["bytes"])


class TrafficMeter:
    """Counts the traffic since the start of the trainer, and of the month in a file of the output folder.

    Other programs of the machine count, too. In network namespaces, as in containers, those of the same one.
    """

    def __init__(self, folder: Path):
        self._file = JsonFile(folder / "traffic.json")
        kept = self._file.load(_parse)
        self._month, self.of_month = kept or ("", 0)  # the bytes of the month
        self._last = count_bytes()
        self.started_at, self.bytes = time.monotonic(), 0
        self._minute = self.started_at, 0  # when the running minute began, and the bytes before it
        self._busiest = 0  # bytes of the busiest minute

    def update(self) -> None:
        """Add the traffic since the last call, and write the month's."""
        now, counted = time.monotonic(), count_bytes()
        new, self._last = max(0, counted - self._last), counted  # the counters of an interface may begin anew
        self.bytes += new
        if self._month != _this_month():
            self._month = _this_month()
            self.of_month = 0
        self.of_month += new
        since, before = self._minute
        self._busiest = max(self._busiest, self.bytes - before)
        if now >= since + MINUTE:
            self._minute = now, self.bytes
        self._file.save({"month": self._month, "bytes": self.of_month})

    def is_used_up(self, limit: float) -> bool:
        """Whether another minute like the busiest one could exceed a limit on the bytes of a month."""
        return self.of_month + self._busiest >= limit

    def describe(self) -> str:
        """Return the traffic so far, of an hour, and of the month."""
        hours = (time.monotonic() - self.started_at) / 3600
        rate = "" if 3600 * hours < LEAST_SECONDS else f", {format_size(self.bytes / hours)} an hour"
        return f"{format_size(self.bytes)}{rate}; {format_size(self.of_month)} in this month"
