"""Checks that hivemind is the tested version and that the catalogue of workarounds is complete."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import hivemind
import pytest
import scipy
from hivemind.averaging import averager
from hivemind.averaging.load_balancing import load_balance_peers
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


def overrides() -> Iterator[tuple[str, str]]:
    """Yield the overridden methods of hivemind: the name as in `upstream.TESTED`, and our class."""
    for package in (lib.averaging, lib.peer):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for cls in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(cls) and cls.__module__ == module.name:
                    yield from ((name, cls.__qualname__) for name in overridden_by(cls))


def overridden_by(cls: type) -> Iterator[str]:
    bases = [
        base for base in cls.__mro__ if base.__module__.startswith("hivemind.") and base is not RecordValidatorBase
    ]
    for name, value in vars(cls).items():
        owner = next((base for base in bases if name in vars(base)), None)
        if owner is not None and (inspect.isroutine(value) or isinstance(value, property)):
            yield f"{owner.__module__.removeprefix('hivemind.')}:{owner.__qualname__}.{name}"


def test_hivemind_is_the_tested_version():
    changed = [
        f'    "{name}": ("{row}", "{upstream.digest(name)}"),'
        for name, (row, tested) in upstream.TESTED.items()
        if upstream.digest(name) != tested
    ]
    assert not changed, (
        "hivemind has changed where this code replaces it. Follow docs/upgrading-hivemind.md for the rows named here, "
        "then put these lines into lib/averaging/upstream.py:\n" + "\n".join(changed)
    )
    assert hivemind.__version__ == upstream.TESTED_VERSION
    assert f"hivemind=={upstream.TESTED_VERSION}\n" in REQUIREMENTS.read_text()


def test_overridden_methods_have_digests():
    missing = {name: ours for name, ours in overrides() if name not in upstream.TESTED}
    assert not missing, "add these to TESTED in lib/averaging/upstream.py and to the catalogue"


def test_solver_that_hivemind_calls_is_pinned():
    """scipy is about to remove it. A fresh installation would then fail in each round."""
    assert f"scipy=={scipy.__version__}\n" in REQUIREMENTS.read_text()
    with pytest.warns(DeprecationWarning, match="interior-point"):
        assert load_balance_peers(1000, [100.0, 100.0, 0.0]) == (500, 500, 0)


def test_digests_have_catalogue_rows():
    assert {row for row, _ in upstream.TESTED.values()} <= catalogue_rows().keys()


def test_tests_that_the_catalogue_names_exist():
    for row, line in catalogue_rows().items():
        names = re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", line)
        assert names, f"row {row} names no test"
        for file, function in names:
            assert f"def {function}(" in (ROOT / file).read_text(), f"row {row}: {file}::{function}"


def test_another_hivemind_version_logs_the_rows_to_check(monkeypatch, caplog):
    upstream.warn_of_changes()
    assert not caplog.records
    monkeypatch.setattr(hivemind, "__version__", "1.2.0")
    upstream.warn_of_changes()
    assert "1.2.0 is installed" in caplog.text and caplog.text.endswith("none\n")
    monkeypatch.setattr(averager.DecentralizedAverager, "_shutdown", test_tests_that_the_catalogue_names_exist)
    monkeypatch.delattr(averager.DecentralizedAverager, "run_in_background")
    caplog.clear()
    upstream.warn_of_changes()
    (record,) = caplog.records
    assert "sigint (DecentralizedAverager.run_in_background)" in record.message
    assert "shutdown (DecentralizedAverager._shutdown)" in record.message


@pytest.mark.usefixtures("patches")
def test_patches_are_in_effect_and_applied_once():
    decode = hivemind.utils.MSGPackSerializer._decode_ext_types
    patches.apply_patches()
    assert averager.Matchmaking is StepMatchmaking and hivemind.utils.MSGPackSerializer._decode_ext_types is decode
