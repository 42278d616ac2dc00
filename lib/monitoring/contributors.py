"""Who has contributed how much to a run: samples by public key, kept in contributors.json across restarts.

Samples are a peer's own word, as all metrics are. Names are chosen by strangers and two may choose the same; the key
beside a name tells them apart.
"""

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lib.common.json_file import JsonFile
from lib.monitoring.aggregation import StepReport

MAX_CONTRIBUTORS = 5000  # a key pair costs nothing; 5000 are half a megabyte
MAX_NAME_LENGTH = 64


@dataclass
class Contributor:
    """What one public key has contributed. `key`: a short fingerprint of it; `username`: harmless in a log line."""

    key: str
    username: str = ""
    samples: int = 0
    steps: int = 0

    @property
    def name(self) -> str:
        return self.username or "anonymous"


def fingerprint(public_key: bytes) -> str:
    """64 bits of a public key's hash: enough to tell keys apart, short enough for a table."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def clean_name(name: str) -> str:
    """A name on one line, without control characters and those that change the direction of what follows."""
    spaced = "".join(" " if c.isspace() else c for c in unicodedata.normalize("NFC", name))
    return " ".join("".join(c for c in spaced if c.isprintable()).split())[:MAX_NAME_LENGTH]


class Contributors:
    """Adds up the contributions of a run, each global step once.

    :param folder: the monitor's output folder
    """

    def __init__(self, folder: Path, run_id: str):
        self._file, self.run_id = JsonFile(folder / "contributors.json"), run_id
        self.step = -1  # the newest that has been counted
        self._contributors: dict[str, Contributor] = {}
        self._names: dict[str, str] = {}  # of peers that are there now; some have not contributed yet
        self._file.load(self._parse)

    def __len__(self) -> int:
        return len(self._contributors)

    @property
    def total_samples(self) -> int:
        return sum(contributor.samples for contributor in self._contributors.values())

    def top(self, number: int) -> list[Contributor]:
        """Those with the most samples, most first."""
        return sorted(self._contributors.values(), key=lambda contributor: (-contributor.samples, contributor.key))[
            :number
        ]

    def note_names(self, names: Mapping[bytes, str]) -> None:
        """Take in what peers call themselves, by public key. A name outlives its record in the DHT."""
        if len(self._names) > MAX_CONTRIBUTORS:
            self._names.clear()
        self._names |= {fingerprint(key): clean_name(name) for key, name in names.items()}
        for key in self._names.keys() & self._contributors.keys():
            self._contributors[key].username = self._names[key] or self._contributors[key].username

    def add(self, report: StepReport) -> None:
        """Count a step, unless it or a later one was counted before a restart."""
        if report.step <= self.step:
            return
        self.step = report.step
        for contribution in report.contributions:
            if contribution.samples_accumulated > 0:
                key = fingerprint(contribution.peer)
                contributor = self._contributors.setdefault(key, Contributor(key, self._names.get(key, "")))
                contributor.samples += contribution.samples_accumulated
                contributor.steps += 1
        if len(self._contributors) > MAX_CONTRIBUTORS:
            self._contributors = {contributor.key: contributor for contributor in self.top(MAX_CONTRIBUTORS)}

    def save(self) -> None:
        """Write contributors.json; trouble with the disk is one warning, the numbers stay in memory."""
        content = {
            "run_id": self.run_id,
            "step": self.step,
            "contributors": [asdict(contributor) for contributor in self.top(MAX_CONTRIBUTORS)],
        }
        self._file.save(content)

    def _parse(self, content: dict) -> None:
        if content["run_id"] != self.run_id:
            raise ValueError(f"it is of the run '{content['run_id']}'")
        contributors = [Contributor(**entry) for entry in content["contributors"]]
        self.step = int(content["step"])
        self._contributors = {contributor.key: contributor for contributor in contributors}


def make_curves(contributors: Contributors, number: int = 10) -> dict[str, int]:
    """The samples of the first few under names that every dashboard takes for a metric's."""
    leaders = contributors.top(number)
    names = [re.sub(r"[^\w -]", "_", leader.name) for leader in leaders]
    return {
        f"contribution/{name} {leader.key[:8]}": leader.samples for name, leader in zip(names, leaders, strict=True)
    }


def format_leaderboard(contributors: Contributors, number: int = 5) -> str:
    """One line for the log: the first few and how many there are."""
    leaders = [f"{leader.name} ({leader.key[:8]}) {leader.samples:,}" for leader in contributors.top(number)]
    return f"Contributors, by samples: {', '.join(leaders)}; {len(contributors)} in all"
