"""Helpers of the tests: real scripts as processes, and peers inside the test's own process."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from arguments import (
    AveragerArguments,
    BaseTrainingArguments,
    CollaborationArguments,
    LocalTrainingArguments,
    ProgressTrackerArguments,
)
from tests.support.launcher import ENVIRONMENT, PYTHON, ROOT, Launcher, end_with_parent

LOCAL = "/ip4/127.0.0.1/tcp/0"
# Trainers are paced, see paced.py: a micro-batch takes PACE seconds on each machine. The model needs 0.02 s of them.
PACE = 0.25
BATCH_SIZE = 16


def steps_of(seconds: float, num_trainers: int, pace: float = PACE) -> tuple[str, int]:
    """The flag for global steps that take so many trainers together so long."""
    return "--target_batch_size", round(seconds * num_trainers * BATCH_SIZE / pace)


# Long enough for two trainers that begin together to see each other in the first step.
LONG_STEPS = steps_of(seconds=5, num_trainers=2)
TINY_ALBERT = {
    "model_type": "albert",
    "embedding_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.0,
    "max_position_embeddings": 64,
}
_TINY_BERT = {**TINY_ALBERT, "hidden_size": 16, "intermediate_size": 32}
del _TINY_BERT["embedding_size"], _TINY_BERT["classifier_dropout_prob"]
# The model families; each vocabulary is the smallest that the kind of tokenizer makes of the sample text, or so.
TINY_CONFIGS = {
    "albert": TINY_ALBERT,
    "bert": {**_TINY_BERT, "model_type": "bert"},
    "roberta": {**_TINY_BERT, "model_type": "roberta", "max_position_embeddings": 66},
    "distilbert": {
        "model_type": "distilbert", "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "dropout": 0.0,
        "attention_dropout": 0.0, "max_position_embeddings": 64,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


def prepare_data(folder: Path, objective: str = "mlm_sop", vocab_size: int = 500, *args: str) -> None:
    """Make `dataset`, `tokenizer` and `config.json` in a folder, as a user would."""
    command = [
        sys.executable, "-W", "ignore", str(ROOT / "tokenize_wikitext103.py"), "--sample", "--train_tokenizer",
        "--vocab_size", str(vocab_size), "--max_seq_length", "32", "--output_path", str(folder / "dataset"),
        "--tokenizer_path", str(folder / "tokenizer"), "--cache_dir", str(folder / "cache"), "--objective", objective,
        *args,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "config.json").write_text(json.dumps(TINY_ALBERT))


def read_jsonl(path: Path) -> list[dict]:
    """The records that a monitor or an evaluator has written so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def reserve_maddr() -> str:
    """An address to listen on, now and after a restart. The port is not one that the system gives away meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)  # Linux gives away 32768 and up
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            return f"/ip4/127.0.0.1/tcp/{port}"


def wait_until(condition, timeout: float, what: str):
    """Wait for a condition to be true and return its value. Where no time is promised, two minutes are enough."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout} seconds: {what}")


class Script:
    """One of our scripts, running as a process of its own group with its output in a file.

    :param enter: what to put before its command, to run it on another host
    :param launcher: starts it in a moment, if that makes no difference
    """

    def __init__(
        self,
        name: str,
        *args: object,
        log: Path,
        env: dict[str, str] | None = None,
        enter: Sequence[str] = (),
        launcher: Launcher | None = None,
    ):
        self.log = log
        self._offset = log.stat().st_size if log.exists() else 0  # a restarted script goes on with the same file
        command, env = [str(ROOT / name), *map(str, args)], env or {}
        if launcher is not None and not enter and launcher.can_start(env):
            self.process = launcher.start(command, env, log)
        else:
            with open(log, "ab") as file:
                self.process = subprocess.Popen(
                    [*enter, *PYTHON, *command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    cwd=log.parent, env={**os.environ, **ENVIRONMENT, **env}, preexec_fn=end_with_parent,
                )  # fmt: skip
        self._known: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self.log.read_bytes()[self._offset :].decode(errors="replace")

    def family(self) -> list[psutil.Process]:
        """This process and all its descendants so far that are still alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            for process in [main, *main.children(recursive=True)]:
                self._known.setdefault(process.pid, process)
        return [process for process in self._known.values() if _is_alive(process)]

    def wait_for(self, pattern: str, timeout: float = 120) -> re.Match:
        """Wait for a line of the output; fail with the output if the process ends before."""

        def found():
            self.family()
            match = re.search(pattern, self.output)
            if match is None and self.process.poll() is not None:
                time.sleep(0.2)
                match = re.search(pattern, self.output)
                assert match is not None, f"ended with {self.process.returncode} before '{pattern}':\n{self.output}"
            return match

        try:
            return wait_until(found, timeout, pattern)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def wait(self, timeout: float = 60) -> int:
        """Wait for the process to end, and return its exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            self.family()
            assert time.monotonic() < deadline, f"still running after {timeout} seconds:\n{self.output}"
            time.sleep(0.1)
        return self.process.returncode

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20) -> int:
        """Send a signal to the main process and wait for its end."""
        self.family()
        self.process.send_signal(number)
        return self.wait(timeout)

    def assert_nothing_left(self, timeout: float = 15) -> None:
        """No process of ours may be left `timeout` seconds after the main process has ended."""
        wait_until(lambda: not self.family(), timeout, f"the end of {[p.pid for p in self.family()]} {self.family()}")

    def kill_all(self) -> None:
        """torch_shm_manager ends by itself once the others have, and removes what they had in /dev/shm."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if not process.name().startswith("torch_shm"):
                    process.kill()
        self.process.wait()

    @property
    def address(self) -> str:
        return self.wait_for(r"--initial_peers (/ip4/\S+)")[1]


def join_together(*trainers: Script) -> None:
    """Hold back each trainer after its first batch until all are there: on a busy machine the first would go alone."""
    for trainer in trainers:
        trainer.family()
    hold_until_all_begin({psutil.Process(trainer.process.pid): trainer.log for trainer in trainers})


def hold_until_all_begin(trainers: dict[psutil.Process, Path], timeout: float = 120) -> None:
    """Stop each trainer after its first batch, and let them continue once all have come that far.

    :param trainers: their main processes and logs
    """
    waiting = dict(trainers)

    def are_held() -> bool:
        for process, log in list(waiting.items()):
            assert _is_alive(process), log.read_text()
            if "Local step 1:" in log.read_text():
                process.suspend()
                del waiting[process]
        return not waiting

    try:
        wait_until(are_held, timeout, "all trainers have begun")
    finally:
        for process in trainers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Scripts:
    """Starts scripts and makes sure that none outlives the test.

    :param enter: what to put before their commands, to run them on another host
    :param launcher: starts them in a moment; without one, each spends seconds on its imports
    """

    def __init__(self, folder: Path, data: Path, enter: Sequence[str] = (), launcher: Launcher | None = None):
        self.folder, self.data, self.enter, self.launcher = folder, data, enter, launcher
        self.running: list[Script] = []

    def start(self, name: str, *args: object, log: str, env: dict[str, str] | None = None) -> Script:
        script = Script(name, *args, log=self.folder / f"{log}.log", env=env, enter=self.enter,
                        launcher=self.launcher)  # fmt: skip
        self.running.append(script)
        return script

    def monitor(self, *args: object, name: str = "monitor", wrappers: Sequence[str] = ()) -> Script:
        """:param wrappers: scripts that run this one, such as tests/support/pausing.py"""
        return self.start(
            *wrappers, "run_training_monitor.py", "--tokenizer_path", self.data / "tokenizer", "--model_name_or_path",
            self.data / "config.json", "--host_maddrs", reserve_maddr(), "--refresh_period", 0.5, "--output_dir",
            self.folder / name, *args, log=name,
        )  # fmt: skip

    def trainer(
        self, name: str, *args: object, name_of_script: str = "run_trainer.py", pace: float = PACE, wrappers=()
    ) -> Script:
        """No data loader processes; steps of 64 samples, a second of one trainer, unless told otherwise."""
        return self.start(
            *wrappers, "tests/support/paced.py", name_of_script,
            "--tokenizer_path", self.data / "tokenizer", "--dataset_path", self.data / "dataset",
            "--model_name_or_path", self.data / "config.json", "--host_maddrs", LOCAL, "--output_dir",
            self.folder / name, "--target_batch_size", 64, "--per_device_train_batch_size", BATCH_SIZE,
            "--gradient_accumulation_steps", 1, "--dataloader_num_workers", 0, "--matchmaking_time", 5,
            "--averaging_timeout", 30, "--target_group_size", 2, "--warmup_steps", 0, "--learning_rate", 0.03,
            "--max_refresh_period", 2, *args,
            log=name, env={"PACE": str(pace)},
        )  # fmt: skip

    def close(self) -> None:
        for script in self.running:
            script.kill_all()


def invite(authority, path: Path, days: float = 1.0) -> str:
    """Write an invitation to a run with this authority, and return its path."""
    from lib.peer.invitations import make_invitation, save_invitation

    save_invitation(make_invitation(authority, "alice", days), path)
    return str(path)


@contextlib.contextmanager
def local_peer(
    folder: Path, run_id: str, initial_peers: tuple[str, ...] = (), client_mode: bool = False, **options
) -> Iterator:
    """A DHT peer inside the test's process."""
    from lib.peer.peer import start_peer

    options = {"host_maddrs": [LOCAL], "bootstrap_timeout": 60, **options}
    args = BaseTrainingArguments(run_id=run_id, initial_peers=list(initial_peers), **options)
    peer = start_peer(args, folder / "identity.key", client_mode, threading.Event())
    try:
        yield peer
    finally:
        peer.dht.shutdown()


@contextlib.contextmanager
def local_optimizer(model, peer, batch_size_per_step: int, **collaboration) -> Iterator:
    """The optimizer as trainers build it, without delays: the global step is done when `step` returns."""
    from lib.training.optimizer import build_optimizer

    hyperparameters = {"learning_rate": 0.01, "warmup_steps": 0, "total_steps": 1000, "max_grad_norm": 0.0}
    overrides = {name: collaboration.pop(name) for name in list(collaboration) if name in hyperparameters}
    options = {
        "delay_grad_averaging": False,
        "delay_optimizer_step": False,
        "matchmaking_time": 3.1,
        "averaging_timeout": 15.0,
        **collaboration,
    }
    collaboration_args = CollaborationArguments(**options)
    training_args = LocalTrainingArguments(**{**hyperparameters, **overrides})
    optimizer = build_optimizer(
        model,
        peer,
        batch_size_per_step,
        training_args,
        collaboration_args,
        AveragerArguments(),
        ProgressTrackerArguments(min_refresh_period=0.1, max_refresh_period=0.5, default_refresh_period=0.2),
    )
    try:
        yield optimizer
    finally:
        optimizer.shutdown()
