#!/usr/bin/env python3
"""See a collaboration at work on this machine: several trainers that train one small language model together.

    ./run_local_demo.py                                    # two trainers, on the documentation that Python carries
    ./run_local_demo.py --train_file my.txt --trainers 3

It runs the scripts that strangers run on machines far apart, shows their command lines, and downloads nothing.
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
from typing import TYPE_CHECKING, TypeVar

from filelock import lock_descriptor

from lib.common.atomic_files import check_target
from lib.common.checks import require, require_positive
from lib.common.cli import parse_arguments
from lib.common.errors import UserError, run_script
from lib.common.processes import leave_with_parent

# rich is imported where it is used: `run_script` tells how to install it.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCRIPTS = Path(__file__).parent
COMMANDS_FILE = "commands.txt"  # also marks a folder as one that the next demo may replace

RUN_ID = "demo"
SEQUENCE_LENGTH = 128
# A core computes about 85 samples per second: two trainers need some 3 seconds for a step. In one of these gradients
# and parameters are averaged in the background.
TARGET_BATCH_SIZE = 512
LEARNING_RATE = 0.06  # brings the loss from 8.3 to 7 in 10 steps; at 0.1 it soon bounces

STOP_TIMEOUT = 20.0  # seconds; a trainer ends by itself within 15
STALL_TIMEOUT = 300.0  # seconds without news; with ten other busy processes on two cores, a first step took 80

T = TypeVar("T")


@dataclass
class DemoArguments:
    """A collaboration of several trainers on one machine."""

    _argument_group_name = "Demo"

    train_file: str | None = field(
        default=None, metadata={"help": "A text file of your own, UTF-8. Default: the documentation of Python"}
    )
    vocab_size: int = field(
        default=2000, metadata={"help": "Tokens of the tokenizer that is trained on the text. Short texts need fewer"}
    )
    trainers: int = field(default=2, metadata={"help": "Number of trainers. Each keeps one core busy"})
    max_global_steps: int = field(default=10, metadata={"help": "Stop after this many steps of the collaboration"})
    output_dir: str = field(
        default="demo", metadata={"help": "Folder for all that is made. What a previous demo left there is removed"}
    )
    debug: bool = field(default=False, metadata={"help": "Show the traceback of a fatal error"})

    def __post_init__(self):
        require_positive(self, "vocab_size")
        require(self.trainers >= 2, f"--trainers must be 2 or more, got {self.trainers}: one has nobody to train with")
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
    from rich.console import Console

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: an exception, which ends the processes
    started = time.monotonic()
    console = Console(highlight=False, soft_wrap=True)
    with new_demo_folder(Path(args.output_dir)) as folder:
        with Workers(folder, console) as workers:
            train_together(args, workers, console)
        result = Result.read(folder)
        console.print(result.summarize(folder, time.monotonic() - started), markup=False)
        result.check()


def train_together(args: DemoArguments, workers: Workers, console: Console) -> None:
    """Prepare the data, start monitor and trainers, and wait until the trainers have made all their steps."""
    console.print("Each of the commands below could be typed in a terminal, or on a machine, of its own.\n")
    console.print("[bold]1. Text and tokenizer[/bold] (some 10 seconds, if the text is not long)")
    tokenization = workers.start("tokenize", tokenize_command(args))
    workers.wait_for(lambda: not tokenization.is_running, math.inf, "the tokenized text")

    console.print("[bold]2. The monitor[/bold], the peer that welcomes the others (some 10 seconds)")
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
    """The folder of this run: what an earlier demo left in it is removed, and no other demo gets it meanwhile.

    :raises UserError: if it holds something else, or another demo is using it
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


# --- the command lines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command line of one of the project's scripts. `flags`: name -> value, True for a flag that has none."""

    script: str
    flags: dict[str, object]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> list[list[str]]:
        """The flags, each with its value."""
        return [[f"--{flag}"] if value is True else [f"--{flag}", str(value)] for flag, value in self.flags.items()]

    @property
    def arguments(self) -> list[str]:
        return [word for part in self.parts for word in part]

    def as_typed(self, width: int = 110) -> str:
        """The command as a person types it in the current folder, in lines of about `width` characters."""
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
    """What the monitor and all trainers are told alike, and the folder of this one."""
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
    return Command(
        "run_training_monitor.py", {**peer_flags(args, "monitor"), "refresh_period": 1, "report_to": "trackio"}
    )


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
        "target_group_size": args.trainers,  # a group that is complete need not wait for others
        "matchmaking_time": 3.5,
        "max_global_steps": args.max_global_steps,
        "leave_timeout": 30,
    }
    return Command("run_trainer.py", flags, environment={"OMP_NUM_THREADS": "1"})  # a core for each


# --- the processes ---------------------------------------------------------------------------------------------------


class Worker:
    """One of the scripts as a process, with its output in a file."""

    def __init__(self, name: str, command: Command, log: Path):
        self.name, self.log = name, log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPTS / command.script), *command.arguments],
                env={**os.environ, **command.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=leave_with_parent,  # this program has no threads, which would make it unsafe
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    def check(self) -> None:
        """:raises UserError: if the process has failed"""
        code = self.process.poll()
        if code:
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            last_line = next(reversed(self.read_log().strip().splitlines()), "(empty)")
            reason = last_line.split(": error: ")[-1].strip()  # our scripts' last words, see errors.py
            raise UserError(f"{self.name} ended with {how}: {reason} (see {self.log})")


class Workers:
    """All processes of the demo. None of them is left running when the block ends, whatever the reason."""

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
        """Print a command line and start it; its output goes to NAME.log."""
        typed = command.as_typed()
        self.console.print(f"{typed}\n", style="cyan", markup=False)
        with open(self.folder / COMMANDS_FILE, "a") as file:
            file.write(f"{typed}\n\n")
        worker = Worker(name, command, self.folder / f"{name}.log")
        self.all.append(worker)
        return worker

    def wait_for(self, condition: Callable[[], T], timeout: float, what: str) -> T:
        """Wait until a condition is true.

        :returns: its value
        :raises UserError: if a process fails, or after `timeout` seconds
        """
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            self.check()
            if time.monotonic() > deadline:
                raise UserError(f"waited {timeout:.0f} seconds for {what} in vain; see the logs in {self.folder}")
            time.sleep(0.1)
        self.check()
        return value

    def check(self) -> None:
        """:raises UserError: if a process has failed"""
        for worker in self.all:
            worker.check()

    def stop(self) -> None:
        """Ask the processes that run to end, and kill those that do not within `STOP_TIMEOUT` seconds."""
        running = [worker.process for worker in self.all if worker.is_running]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        try:
            while any(process.poll() is None for process in running) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:  # a second Ctrl-C does not wait
            for process in running:
                process.kill()  # and with it its children, see processes.py
                process.wait()


def read_address(peer_file: Path) -> str | None:
    """The address at which others join through the monitor; None before it has started."""
    return json.loads(peer_file.read_text())["initial_peers"][0] if peer_file.exists() else None


# --- the view --------------------------------------------------------------------------------------------------------


def watch(
    args: DemoArguments, workers: Workers, monitor: Worker, trainers: Sequence[Worker], console: Console
) -> None:
    """Show the steps until all trainers have ended.

    :raises UserError: if a process fails, or nothing happens for `STALL_TIMEOUT` seconds
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
    """Shows the steps: in a terminal as a table that grows, elsewhere as a line each."""

    MAX_ROWS = 15

    def __init__(self, console: Console, max_global_steps: int):
        from rich.live import Live

        self.console, self.max_global_steps = console, max_global_steps
        can_redraw = sys.stdout.isatty() and not console.is_dumb_terminal
        # Without its thread that redraws: a process with threads must not fork
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
        """:param messages: what each process said last, by its name"""
        from rich.console import Group
        from rich.text import Text

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
        from rich.bar import Bar
        from rich.table import Table

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
    """The newest message in a log, without time and level."""
    messages = re.findall(r"^.{,30}\[(?:INFO|WARN|WARNING|ERROR)\] (.*)$", log, flags=re.MULTILINE)
    return messages[-1] if messages else "starting"


# --- the result ------------------------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> list[dict]:
    """The lines of a file that a process may be writing; none if it is not there."""
    if not path.exists():
        return []
    *lines, _incomplete = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def count_rounds(entries: Iterable[dict]) -> Counter[int]:
    """Group size -> rounds in which gradients were averaged by so many peers, from rounds.jsonl of all trainers."""
    rounds = {(entry["step"], frozenset(entry["group"])) for entry in entries if entry["outcome"] == "averaged"}
    return Counter(len(group) for _, group in rounds)  # each of the group has written it


def find_checkpoint(monitor_folder: Path) -> str | None:
    """The monitor's newest checkpoint."""
    found = sorted(monitor_folder.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    return str(found[-1]) if found else None


def dashboard_command(monitor_folder: Path) -> str | None:
    """What shows the curves; None if the monitor could not start its dashboard."""
    folder = Path(os.environ.get("TRACKIO_DIR", monitor_folder.resolve() / "trackio"))
    if not folder.is_dir():
        return None
    return f"TRACKIO_DIR={shlex.quote(str(folder))} trackio show --project {RUN_ID}"


@dataclass
class Result:
    """What came out of a demo. `rounds`: see `count_rounds`; `dashboard`: the command that shows the curves."""

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
        """:raises UserError: if the trainers did not train together, or learnt nothing"""
        if not any(size >= 2 for size in self.rounds):
            raise UserError("no step was averaged by two trainers; see 'Averag' in their logs")
        if len(self.losses) < 2:
            raise UserError("fewer than two steps were reported, so there is no telling whether the loss fell")
        if self.losses[-1] >= self.losses[0]:
            raise UserError(f"the loss did not fall: {self.losses[0]:.3f} at first, {self.losses[-1]:.3f} at last")

    def summarize(self, folder: Path, seconds: float) -> str:
        """For people: what happened, and where to look next."""
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
            "Look at the curves and try the model (which has learnt little in so short a time):",
            "",
        ]
        if sys.prefix != sys.base_prefix:
            lines.append(f"  source {shlex.quote(os.path.relpath(Path(sys.prefix) / 'bin' / 'activate'))}")
        if self.dashboard is not None:
            lines.append(f"  {self.dashboard}")
        if self.checkpoint is not None:
            guesses = f"pipeline('fill-mask', {self.checkpoint!r})('The value of the [MASK].')"
            code = f"from transformers import pipeline; print([guess['token_str'] for guess in {guesses}])"
            lines.append(f'  python -c "{code}"')
        return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
