"""Contributions to a run: samples by public key, kept in contributors.json across restarts.

Like all metrics, the samples are self-reported. Names are chosen by untrusted peers and need not be unique; the key
beside a name identifies the peer.
"""

import hashlib
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cotrain.common.json_file import JsonFile
from cotrain.monitoring.aggregation import StepReport

MAX_CONTRIBUTORS = 5000  # a key pair costs nothing; 5000 are half a megabyte
MAX_NAME_LENGTH = 64
TABLE_COLUMNS = ("place", "name", "key", "samples", "steps")


@dataclass
class Contributor:
    """Contribution of one public key. `key`: a short fingerprint of it; `username`: safe in a log line."""

    key: str
    username: str = ""
    samples: int = 0
    steps: int = 0

    @property
    def name(self) -> str:
        return self.username or "anonymous"


def fingerprint(public_key: bytes) -> str:
    """Return 64 bits of a public key's SHA-256: enough to distinguish keys, short enough for a table."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def one_line(text: str) -> str:
    """Return a text on one line, without control characters and characters that change the text direction."""
    spaced = "".join(" " if c.isspace() else c for c in text)
    return " ".join("".join(c for c in spaced if c.isprintable()).split())


def clean_name(name: str) -> str:
    return one_line(unicodedata.normalize("NFC", name))[:MAX_NAME_LENGTH]


class Contributors:
    """Sums the contributions of a run. A restart counts no step twice; a step that the run repeats counts again."""

    def __init__(self, folder: Path, run_id: str):
        self._file, self.run_id = JsonFile(folder / "contributors.json"), run_id
        self.step = self._loaded_step = -1  # the newest step that is counted, and that was before a restart
        self._contributors: dict[str, Contributor] = {}
        self._names: dict[str, str] = {}  # fingerprint -> name, also of peers that have not contributed yet
        self._file.load(self._parse)

    def __len__(self) -> int:
        return len(self._contributors)

    def top(self, number: int) -> list[Contributor]:
        """Return the contributors with the most samples, in descending order."""
        leaders = sorted(self._contributors.values(), key=lambda contributor: (-contributor.samples, contributor.key))
        return leaders[:number]

    def find_name(self, public_key: bytes) -> str:
        """Return the name of a peer and the beginning of its fingerprint."""
        key = fingerprint(public_key)
        return f"{self._names.get(key) or 'anonymous'} ({key[:8]})"

    def record_names(self, names: Mapping[bytes, str]) -> None:
        """Update the names of peers, by public key. A name is kept after its record in the DHT expires."""
        if len(self._names) > MAX_CONTRIBUTORS:
            self._names.clear()
        self._names |= {fingerprint(key): clean_name(name) for key, name in names.items()}
        for key in self._names.keys() & self._contributors.keys():
            self._contributors[key].username = self._names[key] or self._contributors[key].username

    def add(self, report: StepReport) -> None:
        """Add the contributions of a step, unless it or a later one was counted before a restart."""
        if report.step <= self._loaded_step:
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
        """Write contributors.json. A failed write is one warning; the values stay in memory."""
        contributors = [asdict(contributor) for contributor in self.top(MAX_CONTRIBUTORS)]
        self._file.save({"run_id": self.run_id, "step": self.step, "contributors": contributors})

    def _parse(self, content: dict) -> None:
        if content["run_id"] != self.run_id:
            raise ValueError(f"it belongs to the run '{content['run_id']}'")
        contributors = [Contributor(**entry) for entry in content["contributors"]]
        self.step = self._loaded_step = int(content["step"])
        self._contributors = {contributor.key: contributor for contributor in contributors}


def build_table(contributors: Contributors) -> list[tuple[int, str, str, int, int]]:
    """Return the rows of the leaderboard, one value for each of TABLE_COLUMNS. Names are plain text of a peer."""
    leaders = enumerate(contributors.top(100), 1)
    return [(place, leader.name, leader.key[:8], leader.samples, leader.steps) for place, leader in leaders]


def format_leaderboard(contributors: Contributors, number: int = 5) -> str:
    """Return one line for the log."""
    leaders = [f"{leader.name} ({leader.key[:8]}) {leader.samples:,}" for leader in contributors.top(number)]
    return f"Contributors, by samples: {', '.join(leaders)}; {len(contributors)} in all"
