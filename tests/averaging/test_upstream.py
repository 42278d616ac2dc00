"""Checks that hivemind is the tested version and that the catalogue of workarounds is complete."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import hivemind
import pytest
from hivemind.averaging import averager
from hivemind.dht.validation import RecordValidatorBase

import lib.averaging
import lib.peer
from lib.averaging import patches, upstream
from lib.averaging.matchmaking import StepMatchmaking

ROOT = Path(__file__).parents[2]
CATALOGUE = ROOT / "docs" / "upgrading-hivemind.md"
REQUIREMENTS = ROOT / "requirements.txt"


def catalogue_rows() -> dict[str, str]:
    """Return the rows of the catalogue's tables: first column -> the whole line."""
    return {match[1]: match[0] for match in re.finditer(r"^\| `([a-z-]+)` \|.*$", CATALOGUE.read_text(), re.M)}


def overridden_modules() -> Iterator[tuple[str, str]]:
    """Yield the modules of hivemind with overridden methods, as in `upstream.TESTED`, and our class."""
    for package in (lib.averaging, lib.peer):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for cls in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(cls) and cls.__module__ == module.name:
                    yield from ((name, cls.__qualname__) for name in overridden_by(cls))


def overridden_by(cls: type) -> Iterator[str]:
    bases = [
        base for base in cls.__mro__ if base.__module__.startswith("hivemind.") and base is not RecordValidatorBase
    ]
    for name in vars(cls).keys() - {"__module__", "__doc__"}:
        yield from {base.__module__.removeprefix("hivemind.") for base in bases if name in vars(base)}


def test_hivemind_is_the_tested_version():
    changed = [
        f'    "{module}": "{upstream.digest(module)}",'
        for module, tested in upstream.TESTED.items()
        if upstream.digest(module) != tested
    ]
    assert not changed, (
        "hivemind has changed where this code replaces it. Follow docs/upgrading-hivemind.md for the rows that name "
        "these files, then put these lines into lib/averaging/upstream.py:\n" + "\n".join(changed)
    )
    assert hivemind.__version__ == upstream.TESTED_VERSION
    assert f"hivemind=={upstream.TESTED_VERSION}\n" in REQUIREMENTS.read_text()


def test_overridden_modules_have_digests():
    assert not {name: ours for name, ours in overridden_modules() if name not in upstream.TESTED}


def test_files_in_the_catalogue_have_digests():
    files = {file for row in catalogue_rows().values() for file in re.findall(r"((?:\w+/)+\w+)\.py:\d", row)}
    assert files and not {file for file in files if file.replace("/", ".") not in upstream.TESTED}


def test_tests_that_the_catalogue_names_exist():
    for row, line in catalogue_rows().items():
        names = re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", line)
        assert names, f"row {row} names no test"
        for file, function in names:
            assert f"def {function}(" in (ROOT / file).read_text(), f"row {row}: {file}::{function}"


def test_another_hivemind_version_logs_the_files_that_differ(monkeypatch, caplog):
    upstream.warn_of_changes()
    assert not caplog.records
    monkeypatch.setattr(hivemind, "__version__", "1.2.0")
    upstream.warn_of_changes()
    assert "1.2.0 is installed" in caplog.text and caplog.text.endswith("none has changed\n")
    monkeypatch.setattr(upstream, "TESTED", {**upstream.TESTED, "dht.dht": "0", "dht.gone": "0"})
    caplog.clear()
    upstream.warn_of_changes()
    (record,) = caplog.records
    assert record.message.endswith("these files: dht/dht.py, dht/gone.py")


@pytest.mark.usefixtures("patches")
def test_patches_are_in_effect_and_applied_once():
    decode = hivemind.utils.MSGPackSerializer._decode_ext_types
    patches.apply_patches()
    assert averager.Matchmaking is StepMatchmaking and hivemind.utils.MSGPackSerializer._decode_ext_types is decode
