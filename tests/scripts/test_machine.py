"""Machines that are set up otherwise: each is worked with, or refused by a last line that says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cotrain.common.diagnosis import HINT
from tests.support.launcher import ENVIRONMENT
from tests.support.peers import LOCAL
from tests.support.processes import ROOT

NOT_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0"}


def run_in_namespace(setup: str, *command: object) -> subprocess.CompletedProcess:
    """Run a command on this machine with other mounts, which a line of bash makes first."""
    shell = ["unshare", "--mount", "bash", "-c", f'{setup} && exec "$@"', "bash", *map(str, command)]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run(shell, capture_output=True, encoding="utf-8", env=environment, timeout=300)


@pytest.fixture(scope="module")
def namespace() -> None:
    """Skip the test where mounts need more rights than it has."""
    try:
        fault = run_in_namespace("mount -t tmpfs tmpfs /dev/shm", "true").stderr
    except FileNotFoundError as error:
        fault = str(error)
    if fault:
        pytest.skip(f"no mounts in a namespace here: {fault}")


@pytest.mark.parametrize("tmpdir", ["x" * 90, "no/such/folder"], ids=["long", "missing"])
def test_trainer_with_a_temporary_folder_that_sockets_cannot_use(scripts, tmp_path, tmpdir):
    folder = tmp_path / tmpdir
    if "/" not in tmpdir:
        folder.mkdir()
    trainer = scripts.trainer("trainer", env={"TMPDIR": str(folder)})
    trainer.wait_for(r"\bStep #1\b")
    assert trainer.stop() == 0, trainer.output


@pytest.mark.peers
@pytest.mark.parametrize(
    ("mount", "remedy"),
    [
        ("mount -t tmpfs -o size=64k tmpfs /dev/shm", "enlarge `/dev/shm`: in Docker with `--shm-size"),
        ("mount -t tmpfs -o ro tmpfs /dev/shm", "make `/dev/shm` a folder that every user may write to"),
        ("mkdir read_only && mount -t tmpfs -o ro tmpfs read_only && cd read_only", "pass a folder on another disk"),
    ],
    ids=["small /dev/shm", "read-only /dev/shm", "read-only folder"],
)
@pytest.mark.usefixtures("namespace")
def test_last_line_says_what_to_do_about_the_machine(data, tmp_path, monkeypatch, mount, remedy):
    """Also after an error in the middle of the optimizer: nothing of its parts follows."""
    monkeypatch.chdir(tmp_path)
    result = run_in_namespace(
        mount, sys.executable, ROOT / "run_trainer.py", "--host_maddrs", LOCAL, "--target_batch_size", 64,
        "--tokenizer_path", data / "tokenizer", "--dataset_path", data / "dataset",
        "--model_name_or_path", data / "config.json", "--max_global_steps", 1,
    )  # fmt: skip
    *_, error, last = result.stderr.splitlines()
    assert result.returncode == 1 and "run_trainer.py: error: " in error and last.startswith(HINT + remedy), result
    assert "Exception ignored" not in result.stderr and "Traceback" not in result.stderr


def test_trainer_in_a_locale_that_is_not_utf8(scripts, tmp_path):
    folder = tmp_path / "Zoë"
    trainer = scripts.trainer("trainer", "--output_dir", folder, "--username", "Zoë", env=NOT_UTF8)
    trainer.wait_for("This peer is Zoë")
    trainer.wait_for(r"\bStep #1\b")
    assert trainer.stop() == 0, trainer.output
    assert "codec" not in trainer.output and list(folder.glob("checkpoint-*"))


@pytest.mark.parametrize("environment", [NOT_UTF8, {"PYTHONIOENCODING": "ascii:strict"}], ids=["locale", "output"])
def test_texts_that_the_output_cannot_show_end_no_script(tmp_path, environment):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom cotrain.common.errors import run_script\n\n\n"
        "def main():\n    print(sys.argv[1], Path(sys.argv[1]).read_text(encoding='utf-8'), '\\udcff', flush=True)\n"
        "    sys.stderr.write('é\\n')\n\n\nrun_script(main)\n",
        encoding="utf-8",
    )
    (tmp_path / "é").write_text("আমার", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", script, "é"], capture_output=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    shown = ("é", "আমার") if environment is NOT_UTF8 else (r"\xe9", r"\u0986")
    assert all(text.encode() in result.stdout for text in shown), result.stdout
    assert shown[0].encode() in result.stderr
    assert Path(tmp_path / "é").exists()
