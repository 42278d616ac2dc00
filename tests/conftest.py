"""Fixtures: tiny data that the real script prepares once, and scripts that do not outlive their test."""

import asyncio
import gc
import inspect
import logging
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from _pytest.logging import LogCaptureHandler
from filelock import FileLock
from hypothesis import settings

from peerstep.peer.processes import guard_children, keep_memory_shared
from tests.support.namespaces import Internet, why_unavailable

# A test that asks for one of these starts peers, or other programs that spend more than a CPU second. Others are
# marked one by one.
FIXTURES_WITH_PEERS = {"scripts", "demo", "internet", "peers", "build_swarm"}
FIXTURES_WITH_PROGRAMS = {"launcher", "prepared", "repository", "small_text"}
LAST_LINES = 30

settings.register_profile("busy machine", deadline=None)  # the default is 0.2 s for an example
settings.load_profile("busy machine")
gc.disable()  # until the tests are imported, which takes 22 CPU seconds with it and 15 without


def pytest_collection_finish() -> None:
    gc.enable()
    keep_memory_shared()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start peers or other programs, which `make test-fast` leaves out; begin with the longest."""
    for item in items:
        if FIXTURES_WITH_PEERS & set(item.fixturenames):
            item.add_marker(pytest.mark.peers)
        if FIXTURES_WITH_PROGRAMS & set(item.fixturenames):
            item.add_marker(pytest.mark.programs)
    if (worker := getattr(config, "workerinput", None)) is not None:
        items[:] = begin_with_the_longest(items, worker["workercount"])


def begin_with_the_longest(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Move the tests marked `early` to the front of what every second worker runs; xdist divides the list evenly.

    At the end, a test of two minutes left the other workers without work for more than one. No more than half of the
    workers run such tests at the same time: each has several processes.
    """
    longest = [item for item in items if item.get_closest_marker("early")]
    ordered = [item for item in items if item not in longest]
    parts = max(1, workers // 2)
    for part in reversed(range(parts)):
        position = part * len(ordered) // parts
        ordered[position:position] = longest[part::parts]
    return ordered


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests that need more GPUs than this machine has: one, or N with `@pytest.mark.gpu(N)`."""
    if marker := item.get_closest_marker("gpu"):
        import torch  # most tests do not need it

        needed = marker.args[0] if marker.args else 1
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs GPUs: {needed}; this machine has {torch.cuda.device_count()}")


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator:
    """Add the last lines of all scripts' logs to the report of a failure: the cause is often in another peer's."""
    report = yield
    if report.skipped and os.environ.get("REQUIRE_ALL") == "1" and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped, and REQUIRE_ALL=1: {report.longrepr}"
    folder = item.funcargs.get("tmp_path")
    if report.failed and folder is not None:
        for log in sorted(folder.rglob("*.log")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            report.sections.append((f"last lines of {log.relative_to(folder)}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session", autouse=True)
def children_end_with_the_tests() -> None:
    guard_children()


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Remove the variables that a test's program has set: the launcher forks only scripts with its own."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def unchanged_log(monkeypatch) -> Iterator[None]:
    """Undo what a script's start does to the logs of its process. A hint is given again, though once in a process."""
    if (diagnosis := sys.modules.get("cotrain.common.diagnosis")) is not None:
        monkeypatch.setattr(diagnosis, "hinted", set())
    loggers = [logging.getLogger(name) for name in (None, "transformers", "asyncio")]
    before, levels = set(loggers[0].handlers), [logger.level for logger in loggers]
    yield
    for handler in loggers[0].handlers[:]:
        if handler not in before and not isinstance(handler, LogCaptureHandler):
            loggers[0].removeHandler(handler)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def patches() -> None:
    """What `start_peer` does first; for tests of what hivemind finds only when it is replaced."""
    from peerstep.patches import apply_patches  # it imports a lot

    apply_patches()


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder with `dataset`, `tokenizer` and `config.json`, made as a user would; the first worker makes it."""
    from tests.support.peers import prepare_data  # as the next three, not for tests of the engine alone

    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tmp_path_factory.mktemp("data")
        prepare_data(folder)
        return folder
    folder = tmp_path_factory.getbasetemp().parent / "data"  # of this session's workers
    with FileLock(f"{folder}.lock"):
        if not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            prepare_data(folder)
    return folder


@pytest.fixture
def dataset_url(data, tmp_path) -> Iterator[str]:
    """Serve the archive of `data` on this machine."""
    from cotrain.data.archive import DATASET, TOKENIZER, write_archive  # it imports a lot
    from tests.support.peers import served

    (tmp_path / "www").mkdir()
    write_archive(tmp_path / "www" / "data.tar.gz", {DATASET: data / "dataset", TOKENIZER: data / "tokenizer"})
    with served(tmp_path / "www") as address:
        yield f"{address}/data.tar.gz"


@pytest.fixture(scope="session")
def launcher(tmp_path_factory) -> Iterator:
    from tests.support.launcher import Launcher

    launcher = Launcher(tmp_path_factory.mktemp("launcher") / "launcher.log")
    yield launcher
    launcher.close()


@pytest.fixture
def scripts(tmp_path, data, launcher) -> Iterator:
    from tests.support.peers import Scripts

    scripts = Scripts(tmp_path, data, launcher=launcher)
    yield scripts
    scripts.close()


@pytest.fixture
def internet() -> Iterator[Internet]:
    """Hosts with their own networks, if this machine can make them."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with Internet() as internet:
        yield internet


@pytest.fixture
def build_swarm(tmp_path, monkeypatch) -> Iterator[Callable]:
    """Builds the peers of a run in the tests' process; its options are those of `local_optimizer`."""
    from tests.support.swarm import Swarm  # it imports a lot

    monkeypatch.setattr("peerstep.rounds.reducer.LATE_SECONDS", 60.0)  # a busy machine exceeds it
    with ExitStack() as stack:
        yield lambda **options: Swarm(stack, tmp_path, **options)
