"""Helpers of the tests: scripts in separate processes, and peers in the test's process."""

import contextlib
import json
import random
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from arguments import BaseTrainingArguments, CollaborationArguments, LocalTrainingArguments, ProgressTrackerArguments
from cotrain.options import NOTHING, TrainerOptions
from tests.support.engine import LOCAL, TINY_ALBERT
from tests.support.launcher import Launcher
from tests.support.processes import Script, wait_until

ALTERED = "tests/support/altered.py"
# Seconds of a micro-batch, see altered.py. The model needs 0.02 s of them.
PACE = 0.25
BATCH_SIZE = 16


def steps_of(seconds: float, num_trainers: int, pace: float = PACE) -> tuple[str, int]:
    """Return the flag for global steps that take `num_trainers` trainers together `seconds`."""
    return "--target_batch_size", round(seconds * num_trainers * BATCH_SIZE / pace)


# Long enough for two trainers that start together to find each other in the first step.
LONG_STEPS = steps_of(seconds=5, num_trainers=2)
_TINY_BERT = {**TINY_ALBERT, "hidden_size": 16, "intermediate_size": 32}
del _TINY_BERT["embedding_size"], _TINY_BERT["classifier_dropout_prob"]
# Small models of all families.
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


def read_jsonl(path: Path) -> list[dict]:
    """Return the objects in the complete lines of a file; an empty list if the file does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] if path.exists() else []


def reserve_maddr() -> str:
    """Return an address that a peer can listen on now and after a restart.

    The port is below the range from which the system assigns ports to other programs.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)  # Linux assigns ports from 32768
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            return f"/ip4/127.0.0.1/tcp/{port}"


def prepare_data(
    folder: Path, objective: str = "mlm_sop", vocab_size: int = 500, *args: object, launcher: Launcher | None = None,
    train_file: Path | None = None,
) -> None:  # fmt: skip
    """Create `dataset`, `tokenizer` and `config.json` in a folder with tokenize_wikitext103.py.

    :param train_file: default: the sample text
    """
    folder.mkdir(exist_ok=True, parents=True)
    source = ["--sample"] if train_file is None else ["--train_file", train_file.absolute()]
    script = Script(
        "tokenize_wikitext103.py", *source, "--train_tokenizer", "--vocab_size", vocab_size, "--max_seq_length", 32,
        "--output_path", folder / "dataset", "--tokenizer_path", folder / "tokenizer", "--cache_dir", folder / "cache",
        "--objective", objective, *args, log=folder / "prepare.log", launcher=launcher,
    )  # fmt: skip
    assert script.wait(600) == 0, script.output
    # ALBERT's layers share their weights: a second layer would only take time.
    (folder / "config.json").write_text(json.dumps({**TINY_ALBERT, "num_hidden_layers": 1}), encoding="utf-8")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, and yield its address."""
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def join_together(*trainers: Script) -> None:
    """Suspend each trainer after its first batch until all have come that far.

    On a busy machine the first trainer would otherwise take steps alone.
    """
    hold_until_all_begin({psutil.Process(trainer.process.pid): trainer.log for trainer in trainers})


def hold_until_all_begin(trainers: dict[psutil.Process, Path], timeout: float = 120) -> None:
    """Suspend each trainer after its first batch, and resume all once all have come that far.

    :param trainers: main process -> log
    :param timeout: seconds
    """
    waiting = dict(trainers)

    def are_held() -> bool:
        for process, log in list(waiting.items()):
            assert process.status() != psutil.STATUS_ZOMBIE, log.read_text(encoding="utf-8")
            if "Local step 1:" in log.read_text(encoding="utf-8"):
                process.suspend()
                del waiting[process]
        return not waiting

    try:
        wait_until(are_held, timeout, "all trainers have begun")
    finally:
        for process in trainers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


class Scripts:
    """Starts scripts, and kills those that still run when it is closed.

    :param folder: for output folders and logs
    :param data: folder with the files of `prepare_data`
    :param namespace: network namespace of the host to run the scripts on (see Host); without, no peer needs relays
    :param launcher: forks the scripts; without it, each script spends seconds on its imports
    """

    def __init__(
        self, folder: Path, data: Path, namespace: str | None = None, launcher: Launcher | None = None
    ):  # fmt: skip
        self.folder, self.data, self.namespace, self.launcher = folder, data, namespace, launcher
        self._relays = () if namespace is None else ("--use_relay",)
        self.running: list[Script] = []

    def start(self, name: str, *args: object, log: str, env: dict[str, str] | None = None) -> Script:
        script = Script(name, *args, log=self.folder / f"{log}.log", env=env, namespace=self.namespace,
                        launcher=self.launcher)  # fmt: skip
        self.running.append(script)
        return script

    def monitor(self, *args: object, name: str = "monitor", env: dict[str, str] | None = None) -> Script:
        """Start a monitor.

        :param env: environment variables, see altered.py
        """
        return self.start(
            *([ALTERED] if env else []), "run_training_monitor.py", *self._relays, "--tokenizer_path",
            self.data / "tokenizer", "--model_name_or_path", self.data / "config.json", "--host_maddrs",
            reserve_maddr(), "--refresh_period", 1.0, "--output_dir", self.folder / name, *args, log=name, env=env,
        )  # fmt: skip

    def trainer(
        self, name: str, *args: object, name_of_script: str = "run_trainer.py", pace: float = PACE, wrappers=(),
        env: dict[str, str] | None = None,
    ) -> Script:  # fmt: skip
        """Start a trainer. By default a global step has 64 samples, which take one trainer a second.

        :param pace: seconds of a micro-batch
        :param env: more environment variables, such as those of altered.py, or CUDA_VISIBLE_DEVICES: by default the
          trainer sees no GPU
        :param wrappers: scripts that run the trainer's script
        """
        return self.start(
            *wrappers, ALTERED, name_of_script, *self._relays, "--run_id", "albert",
            "--tokenizer_path", self.data / "tokenizer", "--dataset_path", self.data / "dataset",
            "--model_name_or_path", self.data / "config.json", "--host_maddrs", LOCAL, "--output_dir",
            self.folder / name, "--target_batch_size", 64, "--per_device_train_batch_size", BATCH_SIZE,
            "--gradient_accumulation_steps", 1, "--dataloader_num_workers", 0, "--matchmaking_time", 5,
            "--averaging_timeout", 30, "--target_group_size", 2, "--warmup_steps", 0, "--learning_rate", 0.03,
            "--max_refresh_period", 2, *args,
            log=name, env={"PACE": str(pace), **(env or {})},
        )  # fmt: skip

    def metrics(self, name: str = "monitor") -> list[dict]:
        """Return the records that a monitor has written so far."""
        return read_jsonl(self.folder / name / "metrics.jsonl")

    def newest_step(self) -> int:
        """Return the newest step in the monitor's records."""
        return max((record["step"] for record in self.metrics()), default=0)

    def close(self) -> None:
        for script in self.running:
            script.kill_all()
        for script in self.running:
            assert "Exception ignored in" not in script.output, script.output


def invite(authority, path: Path, days: float = 1.0) -> str:
    """Write an invitation to a run with this authority, and return its path."""
    from cotrain.admission.invitations import make_invitation, save_invitation

    save_invitation(make_invitation(authority, "alice", days), path)
    return str(path)


@contextlib.contextmanager
def local_peer(
    folder: Path, run_id: str, initial_peers: tuple[str, ...] = (), client_mode: bool = False, **options
) -> Iterator:
    """Start a DHT peer in the test's process."""
    from cotrain.dht.run_records import record_schemas
    from cotrain.peer.peer import start_peer

    options = {"host_maddrs": [LOCAL], "bootstrap_timeout": 60, **options}
    args = BaseTrainingArguments(run_id=run_id, initial_peers=list(initial_peers), **options)
    with start_peer(args, record_schemas(run_id), folder / "identity.key", client_mode, threading.Event()) as peer:
        yield peer


def build_trainers_optimizer(model, peer, batch_size_per_step: int, tracker=None, **flags):
    """Build a trainer's optimizer.

    :param tracker, flags: values of its flags, those of the progress tracker apart
    """
    from cotrain.training.builders import build_optimizer

    known = LocalTrainingArguments.__dataclass_fields__
    training = {name: flags.pop(name) for name in list(flags) if name in known}
    args = TrainerOptions(
        LocalTrainingArguments(**{"output_dir": tempfile.gettempdir(), **training}),
        None,
        CollaborationArguments(**{"run_id": "run", **flags}),
        ProgressTrackerArguments(**tracker or {}),
        NOTHING,
    )
    return build_optimizer(model, peer, batch_size_per_step, args)


@contextlib.contextmanager
def local_optimizer(model, peer, batch_size_per_step: int, **flags) -> Iterator:
    """Open a trainer's optimizer without delays: the global step is complete when `step` returns."""
    options = {
        "learning_rate": 0.01, "warmup_steps": 0, "total_steps": 1000, "max_grad_norm": 0.0, "matchmaking_time": 3.1,
        "averaging_timeout": 15.0, "delay_grad_averaging": False, "delay_optimizer_step": False,
        "tracker": {"min_refresh_period": 0.1, "max_refresh_period": 0.5, "default_refresh_period": 0.2},
    }  # fmt: skip
    optimizer = build_trainers_optimizer(model, peer, batch_size_per_step, **{**options, **flags})
    try:
        yield optimizer
    finally:
        optimizer.shutdown()
