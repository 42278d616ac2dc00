"""What a check has found, in one line."""

from collections.abc import Callable
from dataclasses import dataclass

from cotrain.common.diagnosis import diagnose
from cotrain.common.errors import describe


@dataclass(frozen=True)
class Finding:
    """Result of a check, with advice if something is wrong."""

    subject: str
    text: str
    advice: str = ""

    @property
    def line(self) -> str:
        mark = "FAILED" if self.advice else "ok"
        return f"{mark:<7} {self.subject}: {'. '.join(filter(None, (self.text, self.advice)))}"


def attempt(subject: str, check: Callable[[], str]) -> Finding:
    """Return the text that a check returns, or the error that it raises."""
    try:
        return Finding(subject, check())
    except Exception as error:
        return explain(subject, error)


def explain(subject: str, error: Exception) -> Finding:
    """Return an error, and what to do about it, which most errors say themselves."""
    row = diagnose(text := describe(error))
    if row is None:
        return Finding(subject, "", text)
    return Finding(subject, text, f"{row.action[0].upper()}{row.action[1:]}")
