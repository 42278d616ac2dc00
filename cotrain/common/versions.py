"""Installed packages, compared with the versions that were tested together."""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
OPTIONAL = {"wandb"}  # a trainer runs without


def read_requirements() -> str:
    """Return the text of requirements.txt, without a clone what the package requires."""
    if REQUIREMENTS.exists():
        return REQUIREMENTS.read_text(encoding="utf-8")
    try:
        return "\n".join(requires("cotrain") or ())
    except PackageNotFoundError:  # some files of a clone
        return ""


def compare_versions(requirements: str) -> dict[str, tuple[str | None, str]]:
    """Return what is not as pinned: package -> the installed version, None if there is none, and the pinned one."""
    others = {}
    for name, pinned in re.findall(r"^([\w-]+)==([\w.]+)", requirements, re.MULTILINE):
        try:
            found = version(name).partition("+")[0]
        except PackageNotFoundError:
            found = None
        if found != pinned and (found or name not in OPTIONAL):
            others[name] = found, pinned
    return others


def describe_versions(others: dict[str, tuple[str | None, str]]) -> str:
    return ", ".join(f"{name} {found or 'is missing'} instead of {pinned}" for name, (found, pinned) in others.items())
