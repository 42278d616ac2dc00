"""Installed packages, compared with the versions that were tested together."""

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
MISSING = "(missing)"


def read_requirements() -> str:
    """Return the text of requirements.txt, without a clone what the installed package requires."""
    is_clone = REQUIREMENTS.exists()
    return REQUIREMENTS.read_text(encoding="utf-8") if is_clone else "\n".join(requires("cotrain") or ())


def compare_versions(requirements: str) -> dict[str, str]:
    """Return the packages that are not as pinned, each with its versions in words. wandb may be left out."""
    others = {}
    for name, pinned in re.findall(r"^([\w-]+)==([\w.]+)", requirements, re.MULTILINE):
        found = MISSING
        with suppress(PackageNotFoundError):
            found = version(name).partition("+")[0]
        if found != pinned and (name, found) != ("wandb", MISSING):
            others[name] = f"{name} {found} instead of {pinned}"
    return others
