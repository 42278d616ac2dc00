"""Checks that hivemind is the tested version and that the catalogue of workarounds is complete."""

import hashlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import hivemind
import pytest
from hivemind.averaging import averager
from hivemind.dht import dht
from hivemind.dht.validation import RecordValidatorBase

import peerstep
from peerstep import patches
from peerstep.peer.averager_process import switch_to_safe_loop
from peerstep.rounds.matchmaking import StepMatchmaking

ROOT = Path(__file__).parents[2]
CATALOGUE = ROOT / "docs" / "upgrading-hivemind.md"
REQUIREMENTS = ROOT / "requirements.txt"

# Module of hivemind -> first 16 hexadecimal digits of the SHA-256 of its source
TESTED = {
    "p2p.p2p_daemon_bindings.datastructures": "20040a1ad5a7d564",
    "averaging.allreduce": "2a67006fc98b9683",
    "averaging.averager": "932a59ddb7e0933d",
    "averaging.control": "894d5d5cb517485c",
    "averaging.matchmaking": "6a775570b7183d7e",
    "averaging.partition": "8905c51826c26d18",
    "compression.base": "9ebe625a254144f7",
    "compression.quantization": "02c8dda6e476e735",
    "compression.serialization": "0c94266be46552b3",
    "dht.crypto": "3b836042a52099ed",
    "dht.dht": "b41230a61e3d04e4",
    "dht.node": "0957c32e123e13b0",
    "dht.protocol": "2fc86983799b090a",
    "dht.routing": "87764ac02dad37ac",
    "dht.schema": "001a6b84fc4161e9",
    "dht.storage": "716d2792852c15de",
    "dht.traverse": "f3851f026b0e039b",
    "dht.validation": "cb90f1cb7303af43",
    "optim.optimizer": "e991b49f4868358c",
    "optim.progress_tracker": "adfcd7467c78d666",
    "optim.state_averager": "55c2b6ad4d40a402",
    "p2p.p2p_daemon": "1eda97687e0a6c5a",
    "p2p.p2p_daemon_bindings.control": "526366fef4a6a2c0",
    "p2p.servicer": "c03aec53776ff134",
    "utils.asyncio": "cc391248ba0736d5",
    "utils.crypto": "e84b422d692c0747",
    "utils.mpfuture": "d3bb82f0ff3070e6",
    "utils.serializer": "7b22cfb275a5a9f2",
}


def digest(module: str) -> str:
    """Return the digest of a module of hivemind, named as in TESTED; "missing" if it does not exist."""
    try:
        return hashlib.sha256(Path(find_spec(f"hivemind.{module}").origin).read_bytes()).hexdigest()[:16]
    except (ImportError, AttributeError, OSError):
        return "missing"


def catalogue_rows() -> dict[str, str]:
    """Return the rows of the catalogue's lists: name -> the whole row."""
    text = CATALOGUE.read_text(encoding="utf-8")
    return {match[1]: match[0] for match in re.finditer(r"^- `([a-z][a-z-]*)`(?: †)?: .*(?:\n  .*)*", text, re.M)}


def overridden_modules(package: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the modules of hivemind whose methods a package overrides, as in `TESTED`, and its class."""
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
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
    changed = [f'    "{module}": "{digest(module)}",' for module, tested in TESTED.items() if digest(module) != tested]
    assert not changed, (
        "hivemind has changed where this code replaces it. Follow docs/upgrading-hivemind.md for the rows that name "
        "these files, then put these lines into tests/peerstep/test_upstream.py:\n" + "\n".join(changed)
    )
    assert f"hivemind=={hivemind.__version__}\n" in REQUIREMENTS.read_text(encoding="utf-8")


def test_overridden_modules_have_digests():
    assert not {name: ours for name, ours in overridden_modules(peerstep) if name not in TESTED}


def test_files_in_the_catalogue_have_digests():
    files = {file for row in catalogue_rows().values() for file in re.findall(r"((?:\w+/)+\w+)\.py:\d", row)}
    assert files and not {file for file in files if file.replace("/", ".") not in TESTED}


def test_tests_that_the_catalogue_names_exist():
    for row, line in catalogue_rows().items():
        names = re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", line)
        assert names, f"row {row} names no test"
        for file, function in names:
            assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), f"row {row}: {file}::{function}"


@pytest.mark.usefixtures("patches")
def test_patches_are_in_effect_and_applied_once():
    before = dict(vars(hivemind.utils.MSGPackSerializer))
    patches.apply_patches()
    assert averager.switch_to_uvloop is dht.switch_to_uvloop is switch_to_safe_loop
    assert averager.Matchmaking is StepMatchmaking and vars(hivemind.utils.MSGPackSerializer) == before
