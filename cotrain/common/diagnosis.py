"""What to do about the messages of a peer: reads the table in messages.md."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("messages.md")
HINT = "What to do: "
MAX_MESSAGE_LENGTH = 500  # of a message; a repr of an exception may have many more


@dataclass(frozen=True)
class Diagnosis:
    """A message of the table."""

    message: str  # fixed words of a message that a peer logs or ends with, in their order; … stands for anything
    action: str  # what to do; links are plain text

    def matches(self, text: str) -> bool:
        """Whether a text contains the message, in upper or lower case."""
        parts = (re.escape(part.strip()) for part in self.message.strip("…").split("…"))
        return re.search(".*?".join(parts), text, re.IGNORECASE) is not None


@cache
def read_diagnoses() -> tuple[Diagnosis, ...]:
    """Return the messages of the table, in their order; a row may have several."""
    text = re.sub(r"\[([^]]*)\]\((?:\.\./)*([^)]*)\)", r"\1 (\2)", TABLE.read_text(encoding="utf-8"))  # links
    rows = re.findall(r"^\| `(.*)` \| .* \| (.*) \|$", text, re.MULTILINE)
    return tuple(Diagnosis(message, action) for messages, action in rows for message in messages.split("`, `"))


def diagnose(text: str) -> Diagnosis | None:
    """Return what is known about a message or a line of a log; None if nothing is."""
    text = " ".join(text[:MAX_MESSAGE_LENGTH].split())
    return next((row for row in read_diagnoses() if row.matches(text)), None)


hinted: set[str] = set()  # messages whose hint this process has given


def next_hint(text: str) -> str | None:
    """Return "What to do: ..." for a message; None if nothing is known, or it was said before."""
    row = diagnose(text)
    if row is None or row.message in hinted:
        return None
    hinted.add(row.message)
    return f"{HINT}{row.action}"
