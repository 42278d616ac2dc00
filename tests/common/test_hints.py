"""The table of messages: a warning or an error is followed by what to do about it, once."""

import io
import logging
import os
import subprocess
import sys

import pytest
import torch

from cotrain.common.diagnosis import HINT, diagnose, next_hint, read_diagnoses
from cotrain.common.errors import TEMPORARY, TemporaryError, UserError, describe, first_line, run_script
from cotrain.common.logs import HintHandler
from tests.support.messages import read_templates
from tests.support.processes import ROOT

NO_GROUP = "No group for step #39 in time: keeping its samples for another try"
FIREWALL = "Peer Qm can't access this node. Probably, libp2p has failed to bypass the firewall"
CANNOT_LISTEN = "cannot listen on --host_maddrs /ip4/0.0.0.0/tcp/31337: port in use or not this machine's address"


@pytest.fixture
def log(monkeypatch):
    """Return a logger, and the text that it has written."""
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(stream), HintHandler()])
    monkeypatch.setattr(root, "level", logging.INFO)
    return logging.getLogger("a peer"), stream.getvalue


def test_full_disk_is_named_without_words_of_python():
    """pyarrow's error was "OSError in 'pyarrow/error.pxi', line 92: [Errno 28] Error writing bytes to file …"."""
    error = OSError(28, "Error writing bytes to file. Detail: [errno 28] No space left on device")
    assert describe(error) == "No space left on device"
    assert describe(OSError(28, "No space left on device", "a.txt")) == "a.txt: No space left on device"


def test_a_variable_of_the_environment_is_named(monkeypatch):
    """Libraries read them when they are imported, and name the value alone."""
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "30s")
    line = describe(ValueError("invalid literal for int() with base 10: '30s'"))
    assert line.startswith("the environment has HF_HUB_DOWNLOAD_TIMEOUT=30s (")
    assert line.endswith("correct it, or unset HF_HUB_DOWNLOAD_TIMEOUT")


def test_full_shared_memory_is_named_without_words_of_python():
    error = RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")
    assert describe(error) == str(error)


def test_hint_follows_the_first_warning_of_a_kind(log):
    logger, read = log
    for step in (39, 40):
        logger.warning("No group for step #%d in time: keeping its samples for another try", step)
    first, hint, second = read().splitlines()
    assert first == NO_GROUP and "#40" in second
    assert hint.startswith(HINT) and "Behind a firewall (docs/networking.md#behind-a-firewall)" in hint


@pytest.mark.parametrize("level, message", [(logging.INFO, NO_GROUP), (logging.ERROR, "something else")])
def test_no_hint_for_what_is_no_warning_or_unknown(log, level, message):
    logger, read = log
    logger.log(level, message)
    assert HINT not in read()


def test_malformed_record_raises_nothing(log):
    logger, _ = log
    HintHandler().handle(logging.LogRecord("a peer", logging.ERROR, "", 0, "%d steps", ("no number",), None))
    logger.warning(object())


def test_each_row_is_a_message_of_the_code():
    missing = [row.message for row in read_diagnoses() if not any(map(row.matches, read_templates()))]
    of_others = [
        "too many open files", "OutOfMemoryError", "CUBLAS_STATUS_ALLOC_FAILED", "unable to allocate shared memory",
        "out of shared memory", "multiprocessing/synchronize.py", "unable to open shared memory object",
        "No usable temporary directory", "torch_shm_manager", "AF_UNIX path too long", "can't start new thread",
        "codec can't encode", "Read-only file system", "No space left on device", "Permission denied",
        "no kernel image is available", "device-side assert", "unspecified launch failure", "CUDA error",
    ]  # fmt: skip
    assert missing == of_others, "has a message been reworded?"
    assert diagnose(describe(torch.OutOfMemoryError("CUDA out of memory"))).message == "OutOfMemoryError"
    assert diagnose("The round of step #3 was partial: received 61% of it").message.endswith("was partial")


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("MPS backend out of memory (MPS allocated: 9 GB)", "lower `--per_device_train_batch_size`"),
        ("CUDA error: out of memory", "lower `--per_device_train_batch_size`"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "lower `--per_device_train"),
        ("CUDA error: no kernel image is available for execution on the device", "hide the GPU"),
        ("CUDA error: device-side assert triggered", "compare `--tokenizer_path` with the data"),
        ("CUDA error: unspecified launch failure", "start again; if it comes back"),
        ("CUDA error: an illegal memory access was encountered", "start again; a loop"),
    ],
)
def test_each_kind_of_fault_of_a_gpu_has_a_remedy(text, action):
    assert diagnose(describe(torch.AcceleratorError(text))).action.startswith(action)


def test_each_row_gives_its_hint_once_as_plain_text():
    hints = {row.message: next_hint(row.message) for row in read_diagnoses()}
    assert len(hints) > 25 and hints == {row.message: HINT + row.action for row in read_diagnoses()}
    assert not any("](" in hint for hint in hints.values())
    assert all(next_hint(row.message) is None for row in read_diagnoses())


@pytest.mark.parametrize(
    ("error", "code", "hints"),
    [(UserError(CANNOT_LISTEN), 1, [f"{HINT}pass another port"]), (TemporaryError("try later"), TEMPORARY, [])],
)
def test_hint_follows_an_error_without_a_remedy(monkeypatch, capsys, error, code, hints):
    def main() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["run_trainer.py"])
    with pytest.raises(SystemExit) as caught:
        run_script(main)
    first, *others = capsys.readouterr().err.splitlines()
    assert caught.value.code == code and first == f"run_trainer.py: error: {error}"
    assert len(others) == len(hints) and all(map(str.startswith, others, hints))


@pytest.mark.parametrize(
    ("text", "line"), [("\n  first  \nsecond", "first  "), ("  \n ", "ValueError"), ("x" * 1000, "x" * 200)]
)
def test_error_is_one_line_and_a_fatal_one_is_described_in_full(text, line):
    assert first_line(ValueError(text)) == line
    assert describe(ValueError("x" * 1000 + "\nmore")) == f"ValueError: {'x' * 1000} (--debug shows where)"


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("unable to allocate shared memory(shm) for file </torch_9_1_40>: No space left on device (28)", "--shm-size"),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out "
         "of shared memory. Please try to raise your shared memory limit.", "--dataloader_num_workers 0"),
        ("OSError in '/lib/python3.11/multiprocessing/synchronize.py', line 57: [Errno 38] Function not implemented",
         "mount -t tmpfs -o mode=1777 tmpfs /dev/shm"),
        ('RuntimeError: torch_shm_manager at "/x/torch_shm_manager": Invalid argument', "export TMPDIR=FOLDER"),
        ("OSError: AF_UNIX path too long", "export TMPDIR=FOLDER"),
        ("[Errno 2] No usable temporary directory found in ['/x', '/tmp']", "export TMPDIR"),
        ("'ascii' codec can't encode character '\\xe9' in position 3: ordinal not in range(128)", "PYTHONUTF8=1"),
        ("'utf-8' codec can't encode characters in position 15-16: surrogates not allowed", "PYTHONUTF8=1"),
        ("the p2p daemon did not start: [Errno 24] Too many open files", "`ulimit -n 4096`, then"),
        ("/data/outputs: Read-only file system", "--output_dir"),
        ("/data/outputs/.lock: Permission denied", "--output_dir"),
        ("Could not save a checkpoint: [Errno 28] No space left on device. Training continues, keeping the previous "
         "checkpoint", "the next checkpoint is tried as usual"),
        ("Some gradients of this peer came too late for step #2. If its link is slower than the others', fewer bits "
         "help, or rounds that are rarer", "--local_updates"),
    ],
)  # fmt: skip
def test_faults_have_a_remedy(message, remedy):
    assert remedy in diagnose(message).action


@pytest.mark.programs
def test_a_peer_of_this_project_and_hivemind_are_hinted():
    """`setup_logging` changes the logging of the whole process: it runs in another one."""
    program = (
        "from cotrain.common.logs import setup_logging\n"
        "from hivemind.utils import get_logger\n"
        "setup_logging()\n"
        f"get_logger('peerstep.optimizer').warning({NO_GROUP!r})\n"
        f"get_logger('hivemind.dht.protocol').warning({FIREWALL!r})\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, encoding="utf-8"
    )
    lines = result.stderr.splitlines()
    assert len(lines) == 4, result.stderr
    assert NO_GROUP in lines[0] and FIREWALL in lines[2]
    assert f"[INFO] {HINT}nothing if it is rare" in lines[1] and f"[INFO] {HINT}open a port" in lines[3]


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_log_has_colors_on_a_terminal_unless_no_color_is_set(environment):
    code = (
        "from cotrain.common.errors import run_script\n"
        "def main():\n"
        "    from hivemind.utils.logging import get_logger\n"
        "    get_logger('hivemind').warning('a line')\n"
        "run_script(main)"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "HIVEMIND_COLORS")}
    environment = {**kept, **environment}
    terminal, other_end = os.openpty()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], stderr=other_end, env=environment, cwd=ROOT, check=True
    )
    os.close(other_end)
    log = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert "a line" in log and ("\x1b[" in log) == ("NO_COLOR" not in environment)
