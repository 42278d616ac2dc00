#!/usr/bin/env python3
"""Run a collaboration on this machine: a monitor, and several trainers that train one small language model together.

    ./run_local_demo.py                                    # two trainers, on the documentation that Python includes
    ./run_local_demo.py --train_file my.txt --trainers 3

The demo runs the same scripts as a collaboration over the internet, shows their command lines, and downloads nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from filelock import lock_descriptor
from rich.bar import Bar
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lib.common.atomic_files import check_target
from lib.common.checks import require, require_positive
from lib.common.cli import parse_arguments
from lib.common.diagnosis import HINT
from lib.common.errors import UserError, run_script
from lib.common.flags import flag
from lib.common.processes import leave_with_parent

SCRIPTS = Path(__file__).parent
COMMANDS_FILE = "commands.txt"  # also marks a folder that the next demo may replace

RUN_ID = "demo"
SEQUENCE_LENGTH = 128
# A core computes about 85 samples per second, so two trainers need about 3 seconds for a global step. One of these
# seconds covers the averaging of gradients and parameters in the background.
TARGET_BATCH_SIZE = 512
LEARNING_RATE = 0.06  # the loss falls from 8.3 to 7 in 10 steps; with 0.1 it soon oscillates

STOP_TIMEOUT = 20.0  # seconds; a trainer ends by itself within 15
STALL_TIMEOUT = 300.0  # seconds without a new step; with ten other busy processes on two cores, a first step took 80

T = TypeVar("T")


@dataclass
class DemoArguments:
    """A collaboration of several trainers on one machine."""

    _argument_group_name = "Demo"

    train_file: str | None = flag(None, "Text file to train on, UTF-8. Default: the documentation of Python")
    vocab_size: int = flag(
        2000, "Vocabulary size of the tokenizer that is trained on the text. Lower it for short texts"
    )
    trainers: int = flag(2, "Number of trainers. Each keeps one core busy")
    max_global_steps: int = flag(10, "Stop after this many global steps")
    output_dir: str = flag("demo", "Folder for all output. The output of a previous demo in it is removed")
    debug: bool = flag(False, "Show the traceback of a fatal error")

    def __post_init__(self):
        require_positive(self, "vocab_size")
        require(
            self.trainers >= 2,
            f"--trainers must be 2 or more, got {self.trainers}: a single trainer has no peer to average with",
        )
        require(
            self.max_global_steps >= 2,
            f"--max_global_steps must be 2 or more, got {self.max_global_steps}: the loss of the first step is that "
            f"of the initial weights",
        )
        require(
            self.train_file is None or Path(self.train_file).is_file(),
            f"--train_file: there is no file '{self.train_file}'",
        )


def main() -> None:
    (args,) = parse_arguments([DemoArguments], __doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: an exception, which stops the processes
    started = time.monotonic()
    console = Console(highlight=False, soft_wrap=True)
    with new_demo_folder(Path(args.output_dir)) as folder:
        with Workers(folder, console) as workers:
            train_together(args, workers, console)
        result = Result.read(folder)
        console.print(result.summarize(folder, time.monotonic() - started), markup=False)
        result.check()


def train_together(args: DemoArguments, workers: Workers, console: Console) -> None:
    """Prepare the data, start monitor and trainers, and wait until the trainers have completed all global steps.

    :raises UserError: if a process fails or no step completes within `STALL_TIMEOUT` seconds
    """
    console.print("You can also run each command below yourself, in a separate terminal or on a separate machine.\n")
    console.print("[bold]1. Text and tokenizer[/bold] (some 10 seconds, if the text is not long)")
    tokenization = workers.start("tokenize", tokenize_command(args))
    workers.wait_for(lambda: not tokenization.is_running, math.inf, "the tokenized text")

    console.print("[bold]2. The monitor[/bold], the peer through which the trainers join (some 10 seconds)")
    monitor = workers.start("monitor", monitor_command(args))
    peer_file = Path(args.output_dir) / "monitor" / "peer.json"
    address = workers.wait_for(lambda: read_address(peer_file), STALL_TIMEOUT, "the address of the monitor")

    console.print(f"[bold]3. {args.trainers} trainers[/bold], which join through its address")
    trainers = [
        workers.start(f"trainer-{number}", trainer_command(args, number, address))
        for number in range(1, args.trainers + 1)
    ]

    console.print("[bold]4. Training[/bold] (the first step takes longer: the trainers start)")
    watch(args, workers, monitor, trainers, console)
    workers.stop()  # the monitor
    workers.check()


@contextmanager
def new_demo_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder for this demo, locked against other demos. The output of an earlier demo is removed.

    :raises UserError: if the folder contains other files, or another demo uses it
    """
    check_target(folder, "--output_dir", overwrite=True, replaceable=(COMMANDS_FILE,))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / COMMANDS_FILE, "a") as file:
        if not lock_descriptor(file.fileno(), blocking=False):
            raise UserError(f"--output_dir: another demo is running in '{folder}'; pass another folder")
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != COMMANDS_FILE:
                path.unlink()
        file.truncate(0)
        yield folder


# --- command lines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command line of one of the project's scripts.

    :param script: path of the script, relative to this file
    :param flags: name -> value; True for a flag without a value
    :param environment: environment variables to set
    """

    script: str
    flags: dict[str, object]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> list[list[str]]:
        """The words of each flag: its name, and its value if it has one."""
        return [[f"--{flag}"] if value is True else [f"--{flag}", str(value)] for flag, value in self.flags.items()]

    @property
    def arguments(self) -> list[str]:
        return [word for part in self.parts for word in part]

    def as_typed(self, width: int = 110) -> str:
        """Return the command for a shell in the current folder, in lines of about `width` characters."""
        script = os.path.relpath(SCRIPTS / self.script)
        script = script if "/" in script else f"./{script}"
        environment = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines = [" ".join([*environment, shlex.quote(script)])]
        for part in map(shlex.join, self.parts):
            if len(lines[-1]) + 1 + len(part) > width:
                lines.append(f"    {part}")
            else:
                lines[-1] += f" {part}"
        return " \\\n".join(lines)


def tokenize_command(args: DemoArguments) -> Command:
    data = Path(args.output_dir) / "data"
    source = {"sample": True} if args.train_file is None else {"train_file": args.train_file}
    return Command(
        "tokenize_wikitext103.py",
        {
            **source,
            "train_tokenizer": True,
            "vocab_size": args.vocab_size,
            "max_seq_length": SEQUENCE_LENGTH,
            "output_path": data / "dataset",
            "tokenizer_path": data / "tokenizer",
            "cache_dir": data / "cache",
        },
    )


def peer_flags(args: DemoArguments, name: str) -> dict[str, object]:
    """Return the flags that the monitor and all trainers have in common, and the output folder of peer `name`."""
    return {
        "run_id": RUN_ID,
        "host_maddrs": "/ip4/127.0.0.1/tcp/0",
        "model_name_or_path": "albert-tiny",
        "tokenizer_path": Path(args.output_dir) / "data" / "tokenizer",
        "learning_rate": LEARNING_RATE,
        "warmup_steps": 0,
        "output_dir": Path(args.output_dir) / name,
    }


def monitor_command(args: DemoArguments) -> Command:
    flags = {**peer_flags(args, "monitor"), "refresh_period": 1, "report_to": "trackio"}
    return Command("run_training_monitor.py", flags)


def trainer_command(args: DemoArguments, number: int, address: str) -> Command:
    name = f"trainer-{number}"
    flags = {
        "initial_peers": address,
        "username": name,
        **peer_flags(args, name),
        "dataset_path": Path(args.output_dir) / "data" / "dataset",
        "use_cpu": True,
        "dataloader_num_workers": 0,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "target_batch_size": TARGET_BATCH_SIZE,
        "target_group_size": args.trainers,  # a complete group does not wait for more peers
        "matchmaking_time": 3.5,
        "max_global_steps": args.max_global_steps,
        "leave_timeout": 30,
    }
    return Command("run_trainer.py", flags, environment={"OMP_NUM_THREADS": "1"})  # one core each


# --- processes -------------------------------------------------------------------------------------------------------


class Worker:
    """A process that runs one of the scripts, with its output in a file.

    :param log: the file, for stdout and stderr
    """

    def __init__(self, name: str, command: Command, log: Path):
        self.name, self.log = name, log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPTS / command.script), *command.arguments],
                env={**os.environ, **command.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=leave_with_parent,  # safe without threads, and this program has none
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    def check(self) -> None:
        """Check that the process has not failed.

        :raises UserError: if it has; the message has the last line of its output
        """
        code = self.process.poll()
        if code:
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            lines = [line for line in self.read_log().strip().splitlines() if not line.startswith(HINT)]
            last_line = next(reversed(lines), "(empty)")
            reason = last_line.split(": error: ")[-1].strip()  # the format of errors.py
            raise UserError(f"{self.name} ended with {how}: {reason} (see {self.log})")


class Workers:
    """All processes of the demo. Those that still run when the block ends are stopped."""

    def __init__(self, folder: Path, console: Console):
        self.folder, self.console = folder, console
        self.all: list[Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_exception) -> None:
        try:
            if any(worker.is_running for worker in self.all):
                self.console.print("Stopping the processes")
        finally:
            self.stop()

    def start(self, name: str, command: Command) -> Worker:
        """Print a command line and start it, with its output in NAME.log."""
        typed = command.as_typed()
        self.console.print(f"{typed}\n", style="cyan", markup=False)
        with open(self.folder / COMMANDS_FILE, "a") as file:
            file.write(f"{typed}\n\n")
        worker = Worker(name, command, self.folder / f"{name}.log")
        self.all.append(worker)
        return worker

    def wait_for(self, condition: Callable[[], T], timeout: float, what: str) -> T:
        """Wait until a condition is true.

        :param timeout: seconds
        :param what: what the condition means, for the error message
        :returns: the value of the condition
        :raises UserError: if a process fails, or after `timeout` seconds
        """
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            self.check()
            if time.monotonic() > deadline:
                raise UserError(f"timeout: waited {timeout:.0f} seconds for {what}; see the logs in {self.folder}")
            time.sleep(0.1)
        self.check()
        return value

    def check(self) -> None:
        """Check that no process has failed.

        :raises UserError: if one has
        """
        for worker in self.all:
            worker.check()

    def stop(self) -> None:
        """Terminate the running processes, and kill those that have not ended within `STOP_TIMEOUT` seconds."""
        running = [worker.process for worker in self.all if worker.is_running]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        try:
            while any(process.poll() is None for process in running) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:  # a second Ctrl-C ends the wait
            for process in running:
                process.kill()  # its children end with it, see processes.py
                process.wait()


def read_address(peer_file: Path) -> str | None:
    """Read the monitor's address for --initial_peers; None before the monitor has started."""
    return json.loads(peer_file.read_text())["initial_peers"][0] if peer_file.exists() else None


# --- view ------------------------------------------------------------------------------------------------------------


def watch(
    args: DemoArguments, workers: Workers, monitor: Worker, trainers: Sequence[Worker], console: Console
) -> None:
    """Show the global steps until all trainers have ended.

    :raises UserError: if a process fails, or no step completes within `STALL_TIMEOUT` seconds
    """
    metrics_path = Path(args.output_dir) / "monitor" / "metrics.jsonl"
    num_steps, changed = 0, time.monotonic()
    with View(console, args.max_global_steps) as view:
        while any(trainer.is_running for trainer in trainers):
            workers.check()
            if not monitor.is_running:
                raise UserError(f"the monitor has ended before the trainers; see {monitor.log}")
            steps = read_jsonl(metrics_path)
            if len(steps) > num_steps:
                num_steps, changed = len(steps), time.monotonic()
            if time.monotonic() > changed + STALL_TIMEOUT:
                raise UserError(f"no step for {STALL_TIMEOUT:.0f} seconds; see the logs in {workers.folder}")
            view.update(steps, {worker.name: last_message(worker.read_log()) for worker in [monitor, *trainers]})
            time.sleep(0.5)
        workers.check()


class View:
    """Shows the global steps: on a terminal as a table that is redrawn, elsewhere as one line each.

    :param max_global_steps: number of global steps of the demo
    """

    MAX_ROWS = 15

    def __init__(self, console: Console, max_global_steps: int):
        self.console, self.max_global_steps = console, max_global_steps
        can_redraw = sys.stdout.isatty() and not console.is_dumb_terminal
        # No automatic refresh, which needs a thread: a process with threads must not fork
        self.live = Live(console=console, auto_refresh=False) if can_redraw else None
        self.num_printed = 0

    def __enter__(self) -> View:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_exception) -> None:
        if self.live is not None:
            self.live.stop()

    def update(self, steps: Sequence[dict], messages: dict[str, str]) -> None:
        """Show the steps so far.

        :param steps: records of metrics.jsonl
        :param messages: name of a process -> the last message in its log
        """
        if self.live is not None:
            lines = [Text.assemble((f"{name}: ", "dim"), message) for name, message in messages.items()]
            for line in lines:
                line.no_wrap, line.overflow = True, "ellipsis"
            self.live.update(Group(self.make_table(steps), *lines), refresh=True)
            return
        for step in steps[self.num_printed :]:
            print(
                f"Step {step['step']} of {self.max_global_steps}   loss {format_loss(step['loss'])}   "
                f"{step['performance']:.0f} samples/s   {step['alive peers']} peers",
                flush=True,
            )
        self.num_printed = len(steps)

    def make_table(self, steps: Sequence[dict]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in (f"step of {self.max_global_steps}", "loss", "samples/s", "peers"):
            table.add_column(name, justify="right", header_style="bold")
        table.add_column(width=40)
        largest = max((step["loss"] or 0.0 for step in steps), default=0.0)
        for step in steps[-self.MAX_ROWS :]:
            table.add_row(
                str(step["step"]),
                format_loss(step["loss"]),
                f"{step['performance']:.0f}",
                str(step["alive peers"]),
                Bar(largest, 0.0, step["loss"] or 0.0, color="cyan"),
            )
        return table


def format_loss(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.3f}"


def last_message(log: str) -> str:
    """Return the newest message of a log, without time and level."""
    messages = re.findall(r"^.{,30}\[(?:INFO|WARN|WARNING|ERROR)\] (.*)$", log, flags=re.MULTILINE)
    return messages[-1] if messages else "starting"


# --- result ----------------------------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> list[dict]:
    """Read the complete lines of a JSON Lines file that a process may be writing; empty if there is no file."""
    if not path.exists():
        return []
    *lines, _incomplete = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def count_rounds(entries: Iterable[dict]) -> Counter[int]:
    """Count the averaging rounds by group size.

    :param entries: records of the rounds.jsonl of all trainers
    :returns: number of peers in the group -> number of rounds
    """
    rounds = {(entry["step"], frozenset(entry["group"])) for entry in entries if entry["outcome"] == "averaged"}
    return Counter(len(group) for _, group in rounds)  # a set: each peer of a group has a record of the round


def find_checkpoint(monitor_folder: Path) -> str | None:
    """Return the path of the monitor's newest checkpoint; None if there is none."""
    found = sorted(monitor_folder.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    return str(found[-1]) if found else None


def dashboard_command(monitor_folder: Path) -> str | None:
    """Return the command that shows the curves; None if the monitor could not start its dashboard."""
    folder = Path(os.environ.get("TRACKIO_DIR", monitor_folder.resolve() / "trackio"))
    if not folder.is_dir():
        return None
    return f"TRACKIO_DIR={shlex.quote(str(folder))} trackio show --project {RUN_ID}"


@dataclass
class Result:
    """Result of a demo.

    :param steps: records of the monitor's metrics.jsonl
    :param rounds: see `count_rounds`
    :param checkpoint: path of the monitor's newest checkpoint
    :param dashboard: command that shows the curves
    """

    steps: list[dict]
    rounds: Counter[int]
    checkpoint: str | None
    dashboard: str | None

    @classmethod
    def read(cls, folder: Path) -> Result:
        monitor = folder / "monitor"
        return cls(
            steps=read_jsonl(monitor / "metrics.jsonl"),
            rounds=count_rounds(entry for path in folder.glob("trainer-*/rounds.jsonl") for entry in read_jsonl(path)),
            checkpoint=find_checkpoint(monitor),
            dashboard=dashboard_command(monitor),
        )

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps if step["loss"] is not None]

    def check(self) -> None:
        """Check that the trainers averaged gradients with each other and that the loss fell.

        :raises UserError: if not
        """
        if not any(size >= 2 for size in self.rounds):
            raise UserError("no step was averaged by two trainers; search their logs for 'Averag'")
        if len(self.losses) < 2:
            raise UserError("fewer than two steps were reported, too few to check that the loss fell; see the logs")
        if self.losses[-1] >= self.losses[0]:
            raise UserError(f"the loss did not fall: {self.losses[0]:.3f} at first, {self.losses[-1]:.3f} at last")

    def summarize(self, folder: Path, seconds: float) -> str:
        """Return a text for the terminal: the result, the output files, and commands to try next."""
        rounds = ", ".join(f"{number} x {size} peers" for size, number in sorted(self.rounds.items())) or "never"
        lines = ["", f"Done in {seconds:.0f} s: {len(self.steps)} steps"]
        if self.losses:
            lines.append(f"  Loss                {self.losses[0]:.3f} at first, {self.losses[-1]:.3f} at last")
        lines += [
            f"  Gradients averaged  {rounds}",
            f"  Checkpoint          {self.checkpoint or 'none'}",
            f"  Steps, as JSON      {folder / 'monitor' / 'metrics.jsonl'}",
            f"  Logs                {folder}/*.log",
            f"  Commands            {folder / COMMANDS_FILE}",
            "",
            "Look at the curves and try the model (which has learnt little in this short time):",
            "",
        ]
        if sys.prefix != sys.base_prefix:
            lines.append(f"  source {shlex.quote(os.path.relpath(Path(sys.prefix) / 'bin' / 'activate'))}")
        if self.dashboard is not None:
            lines.append(f"  {self.dashboard}")
        if self.checkpoint is not None:
            lines.append(
                f"  {Command('fill_mask.py', {}).as_typed()} {shlex.quote(self.checkpoint)} 'The value of [MASK].'"
            )
        return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
