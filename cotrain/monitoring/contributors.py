"""Contributions to a run: samples by peer, kept in contributors.json across restarts.

Like all metrics, the samples are self-reported. Names are chosen by untrusted peers and need not be unique; the end of
the peer ID beside a name tells peers apart.
"""

import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cotrain.common.json_file import JsonFile
from cotrain.common.names import label, short
from cotrain.monitoring.aggregation import PeerStep, StepReport

MAX_CONTRIBUTORS = 5000  # that are kept, and half of those known; a key pair costs nothing
MAX_NAME_LENGTH = 64
# A phone shows the first four
LEADERBOARD_COLUMNS = ("#", "name", "share", "state", "own loss", "samples", "steps", "peer")
MAX_ROWS = 100  # of a leaderboard


@dataclass
class Contributor:
    """Contribution of one peer. `peer_id`: in base58; `username`: safe in a log line."""

    peer_id: str
    username: str = ""
    samples: int = 0
    steps: int = 0
    own_loss: str = ""  # on its own held-out samples, as it states it: before training, and now

    @property
    def name(self) -> str:
        return self.username or "anonymous"


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
        self.known: dict[str, Contributor] = {}  # by peer ID, also those that have not contributed yet
        self._file.load(self._parse)

    @property
    def leaders(self) -> list[Contributor]:
        """The contributors, in descending order of their samples."""
        leaders = [known for known in self.known.values() if known.steps > 0]
        return sorted(leaders, key=lambda leader: (-leader.samples, leader.peer_id))

    def _find(self, peer_id: object) -> Contributor:
        if len(self.known) >= 2 * MAX_CONTRIBUTORS:
            self.known = {leader.peer_id: leader for leader in self.leaders[:MAX_CONTRIBUTORS]}
        return self.known.setdefault(str(peer_id), Contributor(str(peer_id)))

    def find_name(self, peer_id: object) -> str:
        """Return the name of a peer and the end of its ID."""
        return label(self._find(peer_id).name, peer_id)

    def record_names(self, names: Mapping[object, str]) -> None:
        """Update the names of peers. A name is kept after its record in the DHT expires."""
        for peer_id, name in names.items():
            known = self._find(peer_id)
            known.username = clean_name(name) or known.username

    def record_losses(self, records: Mapping[Any, Mapping]) -> None:
        """Update what trainers state of the loss on their own samples."""
        for peer_id, record in records.items():
            base, newest = record.get("own_base_loss"), record.get("own_loss")
            self._find(peer_id).own_loss = "" if None in (base, newest) else f"{base:.3f} -> {newest:.3f}"

    def add(self, report: StepReport) -> None:
        """Add the contributions of a step, unless it or a later one was counted before a restart."""
        if report.step > self._loaded_step:
            self.step = report.step
            self.count(report.contributions)

    def count(self, contributions: Iterable[PeerStep]) -> None:
        """Add the samples of peers in a step; those that are reported late count as well."""
        for contribution in contributions:
            if contribution.samples > 0:
                contributor = self._find(contribution.peer)
                contributor.samples += contribution.samples
                contributor.steps += 1

    def save(self) -> None:
        """Write contributors.json. A failed write is one warning; the values stay in memory."""
        contributors = [asdict(contributor) for contributor in self.leaders[:MAX_CONTRIBUTORS]]
        self._file.save({"run_id": self.run_id, "step": self.step, "contributors": contributors})

    def _parse(self, content: dict) -> None:
        if content["run_id"] != self.run_id:
            raise ValueError(f"it belongs to the run '{content['run_id']}'")
        contributors = [Contributor(**entry) for entry in content["contributors"]]
        self.step = self._loaded_step = int(content["step"])
        self.known = {contributor.peer_id: contributor for contributor in contributors}


def build_leaderboard(contributors: Contributors, paused: Collection[str] = ()) -> list[tuple[object, ...]]:
    """Return the rows of the leaderboard, one value for each of LEADERBOARD_COLUMNS. Names are plain text of a peer.

    :param paused: peer IDs of trainers that pause
    """
    leaders, rows = contributors.leaders, []
    total = sum(x.samples for x in leaders) or 1
    for place, x in enumerate(leaders[:MAX_ROWS], 1):
        share, state = f"{x.samples / total:.1%}", "paused" if x.peer_id in paused else ""
        rows.append((place, x.name, share, state, x.own_loss, x.samples, x.steps, short(x.peer_id)))
    return rows


def format_leaderboard(contributors: Contributors, paused: Collection[str] = ()) -> str:
    """Return one line for the log."""
    leaders, first = contributors.leaders, []
    for leader in leaders[:5]:
        state = " (paused)" if leader.peer_id in paused else ""
        own = leader.own_loss and f" (own loss {leader.own_loss})"
        first.append(f"{label(leader.name, leader.peer_id)} {leader.samples:,}{own}{state}")
    return f"Contributors, by samples: {', '.join(first)}; {len(leaders)} in all"
