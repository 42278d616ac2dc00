"""The package alone: its example, in processes of their own, and that it imports nothing of the scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import peerstep
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "engine.py"


@pytest.mark.peers
def test_example_trains_with_a_slower_and_later_peer(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(name: str, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-W", "ignore", EXAMPLE, f"{name}.key", *arguments]
        if name == "slow":
            command = ["nice", "-n", "10", *command]
        with (tmp_path / f"{name}.log").open("w", encoding="utf-8") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env=environment)

    def text(name: str) -> str:
        return (tmp_path / f"{name}.log").read_text(encoding="utf-8")

    peers = [start("fast")]
    try:
        address = wait_until(lambda: re.search(r"/ip4/127.0.0.1/tcp/\S+(?=\n)", text("fast")), 120, "the address")[0]
        peers.append(start("slow", address))
        for name in ("fast", "slow"):
            wait_until(lambda name=name: text(name).count("averaged") > 1, 300, f"averages of the {name} peer")
    finally:
        for peer in peers:
            peer.terminate()
            peer.wait(60)


@pytest.mark.programs
def test_package_imports_neither_scripts_nor_their_libraries():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import peerstep; "
        "[getattr(peerstep, name) for name in peerstep.__all__]; "
        "print({'cotrain', 'transformers', 'datasets', 'requests'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True, encoding="utf-8"
    )
    assert found.stdout.strip() == "set()", found.stdout
    with pytest.raises(AttributeError, match="peerstep has no Peer"):
        getattr(peerstep, "Peer")  # noqa: B009
