"""The first line of a script: before it waits for PyTorch, and not at all for what is known without it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

PEER = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
MODEL = {"config.json": b"{}", "tokenizer_config.json": b"{}", "model.safetensors": b"\2" + bytes(7) + b"{}"}
DATA = ["--tokenizer_path", ".", "--dataset_path", "nowhere"]
UNWRITABLE = "/proc/nowhere"  # for root, too
LINE = r"{script}: loading PyTorch and other libraries .*\n"


def start(script: str, folder: Path, modules: dict[str, str], *args: str) -> subprocess.Popen:
    """Start a script with other modules in the place of libraries (name -> text)."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    command, env = [sys.executable, str(ROOT / script), *args], {**os.environ, "PYTHONPATH": str(folder)}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=folder, env=env, **streams, encoding="utf-8")


@pytest.mark.parametrize(
    ("script", "args"),
    [
        ("run_trainer.py", ["--initial_peers", PEER]),
        ("run_trainer.py", ["--check"]),
        ("run_custom_trainer.py", ["--initial_peers", PEER]),
        ("run_training_monitor.py", []),
        ("run_evaluator.py", ["--initial_peers", PEER]),
        ("tokenize_wikitext103.py", ["--sample", "--train_tokenizer"]),
        ("generate.py", ["model", "Hello"]),
        ("export_model.py", ["model", "out"]),
        ("invite.py", ["--username", "alice", "--output", "alice.invitation"]),
    ],
)
@pytest.mark.programs
def test_script_speaks_before_it_waits_for_libraries(tmp_path, script, args):
    (tmp_path / "model").mkdir()
    for name, text in MODEL.items():
        (tmp_path / "model" / name).write_bytes(text)
    stop = "import os; os.write(2, b'A library\\n'); os._exit(3)\n"
    process = start(script, tmp_path, dict.fromkeys(("torch", "hivemind", "datasets"), stop), *args)
    _, stderr = process.communicate(timeout=120)
    assert re.fullmatch(LINE.format(script=script) + "A library\n", stderr), stderr


@pytest.mark.parametrize(("package", "words"), [("scipy", "warning"), ("safetensors", "error")])
@pytest.mark.programs
def test_untested_version_of_a_package_is_named(tmp_path, package, words):
    """Only --check did. transformers refuses some packages itself."""
    (tmp_path / f"{package}-0.1.dist-info").mkdir()
    text = f"Name: {package}\nVersion: 0.1\n"
    (tmp_path / f"{package}-0.1.dist-info" / "METADATA").write_text(text, encoding="utf-8")
    process = start("run_trainer.py", tmp_path, {"torch": "raise SystemExit\n"}, "--initial_peers", PEER)
    _, stderr = process.communicate(timeout=120)
    pattern = rf"run_trainer.py: {words}: {package} 0.1 instead of [\d.]+.*; run pip install -r requirements.txt"
    assert re.search(pattern, stderr), stderr


@pytest.mark.programs
def test_script_speaks_while_its_flags_take_long(tmp_path):
    """On a busy machine the parser alone takes many seconds."""
    process = start("run_trainer.py", tmp_path, {"transformers": "import sys; sys.stdin.read()\n"})
    line = process.stderr.readline()
    process.kill()
    process.communicate()
    assert re.fullmatch(LINE.format(script="run_trainer.py"), line)


@pytest.mark.parametrize(
    ("script", "args", "words"),
    [
        ("generate.py", ["nowhere", "Hello"], "CHECKPOINT: there is no folder 'nowhere'; pass "),
        ("export_model.py", ["nowhere", "out"], "CHECKPOINT: there is no folder 'nowhere'; pass "),
        ("run_evaluator.py", [], "--initial_peers is missing"),
        ("run_training_monitor.py", ["--invitation", "nowhere"], "--invitation: there is no file 'nowhere'; pass "),
        ("run_trainer.py", ["--model_name_or_path", "./nowhere"], "there is no file or folder './nowhere'; pass "),
        ("run_trainer.py", ["--tokenizer_path", "nowhere"], "--tokenizer_path: there is no folder 'nowhere'; run "),
        (
            "run_trainer.py",
            ["--output_dir", "torch.py/out"],
            "--output_dir: 'torch.py' is a file; choose another folder",
        ),
        (
            "run_training_monitor.py",
            ["--output_dir", "torch.py"],
            "--output_dir: 'torch.py' is a file; choose another ",
        ),
        (
            "run_evaluator.py",
            ["--output_dir", "torch.py"],
            "--output_dir: 'torch.py' is a file; choose another folder",
        ),
        ("run_trainer.py", DATA, "--dataset_path: there is no folder 'nowhere'; create the data with "),
        ("run_custom_trainer.py", DATA, "--dataset_path: there is no folder 'nowhere'; create the data with "),
        ("run_custom_trainer.py", ["--tokenizer_path", "nowhere"], "--tokenizer_path: there is no folder 'nowhere'"),
        ("run_training_monitor.py", ["--tokenizer_path", "nowhere"], "--tokenizer_path: there is no folder 'nowhere'"),
        *(
            (script, ["--output_dir", UNWRITABLE, *args], f"--output_dir: no file can be written in '{UNWRITABLE}' (")
            for script, args in (
                ("run_trainer.py", ["--initial_peers", PEER]),
                ("run_custom_trainer.py", ["--initial_peers", PEER]),
                ("run_training_monitor.py", []),
                ("run_evaluator.py", ["--initial_peers", PEER]),
            )
        ),
        ("export_model.py", ["model", f"{UNWRITABLE}/out"], "OUT: no file can be written in '/proc/nowhere' ("),
        (
            "tokenize_wikitext103.py",
            ["--sample", "--archive", "/proc/a.tar.gz"],
            "--archive: no file can be written in ",
        ),
        (
            "tokenize_wikitext103.py",
            ["--sample", "--output_path", "/proc/a"],
            "--output_path: no file can be written in ",
        ),
        ("invite.py", ["--username", "a", "--output", "/proc/a"], "--output: no file can be written in '/proc' ("),
        ("invite.py", ["--username", "a", "--output", "torch.py"], "--output: 'torch.py' already exists"),
        ("run_trainer.py", ["--invitation", "torch.py"], "--invitation: 'torch.py' is not an invitation; ask "),
        (
            "run_training_monitor.py",
            ["--identity_path", "torch.py"],
            "'torch.py' is not a peer's private key; remove it",
        ),
        ("run_trainer.py", ["--tokenizer_path", "damaged"], "tokenizer.json' is damaged or incomplete"),
        ("run_training_monitor.py", ["--tokenizer_path", "damaged"], "tokenizer.json' is damaged or incomplete"),
    ],
)
@pytest.mark.programs
def test_fault_of_a_file_is_named_without_torch(tmp_path, script, args, words):
    for name in ("model", "damaged"):
        (tmp_path / name).mkdir()
    for name, text in MODEL.items():
        (tmp_path / "model" / name).write_bytes(text)
    (tmp_path / "damaged/tokenizer.json").write_text("{", encoding="utf-8")
    stop = "raise AssertionError('a slow library')\n"
    process = start(script, tmp_path, dict.fromkeys(("torch", "hivemind"), stop), *args)
    _, stderr = process.communicate(timeout=120)
    assert f"{script}: error: " in stderr and words in stderr, stderr


@pytest.mark.programs
def test_a_script_works_through_a_link(tmp_path):
    """It looked for the list of languages beside the link."""
    (tmp_path / "prepare.py").symlink_to(ROOT / "tokenize_wikitext103.py")
    process = start(str(tmp_path / "prepare.py"), tmp_path, {}, "--sample", "--language", "xx")
    _, stderr = process.communicate(timeout=120)
    assert "--language 'xx' is not known" in stderr, stderr


@pytest.mark.programs
def test_an_interrupt_during_the_first_imports_shows_no_traceback(tmp_path):
    """The monitor's classes of flags take half a second, on a busy machine six, before `run_script`."""
    process = start(
        "run_training_monitor.py",
        tmp_path,
        {"urllib3": "raise KeyboardInterrupt"},
    )
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in stderr, stderr


@pytest.mark.parametrize(
    "script", ["run_trainer.py", "run_training_monitor.py", "tokenize_wikitext103.py", "invite.py"]
)
@pytest.mark.programs
def test_a_users_module_hides_none_of_pythons(tmp_path, script):
    """The scripts ended with a traceback of `tempfile`, urllib3 or `linecache`."""
    hiding = dict.fromkeys(("random", "queue", "tokenize", "logging", "copy"), "x = 1\n")
    process = start(script, tmp_path, hiding, "--help")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0 and "usage: " in stdout and "Traceback" not in stderr, stderr


@pytest.mark.parametrize(("name", "args"), [("datasets", ["--sample", "--train_tokenizer"]), ("psutil", ["--help"])])
@pytest.mark.programs
def test_a_users_module_that_hides_a_package_is_named(tmp_path, name, args):
    """Also during the imports before `run_script`, as for psutil."""
    process = start("tokenize_wikitext103.py", tmp_path, {name: "x = 1\n"}, *args)
    _, stderr = process.communicate(timeout=120)
    words = f"error: '{tmp_path / name}.py' hides the package '{name}': rename it, or take its folder out of "
    assert process.returncode == 1 and words in stderr and "Traceback" not in stderr, stderr
