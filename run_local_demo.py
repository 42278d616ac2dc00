#!/usr/bin/env python3
"""Run a collaboration on this machine: a monitor, and several trainers that train one small language model together.

    ./run_local_demo.py                                    # two trainers, on the documentation that Python includes
    ./run_local_demo.py --train_file my.txt --trainers 3

The demo runs the same scripts as a collaboration over the internet, shows their command lines, and downloads nothing.
"""

from __future__ import annotations

from cotrain.common.errors import UserError, run_script  # isort: skip
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cotrain.common.atomic_files import check_target, lock_folder
from cotrain.common.diagnosis import HINT
from cotrain.common.flags import Flags, flag
from cotrain.common.json_file import read_records
from peerstep.peer.processes import leave_with_parent

SCRIPTS = Path(__file__).resolve().parent
COMMANDS_FILE = "commands.txt"  # also marks a folder that the next demo may replace

# A core computes about 85 samples per second, so two trainers need about 3 seconds for a global step. One of these
# seconds covers the averaging of gradients and parameters in the background.
TARGET_BATCH_SIZE = 512
LEARNING_RATE = 0.06  # the loss falls from 8.3 to 7 in 10 steps; with 0.1 it soon oscillates

WORD_SECONDS = 10.0  # without a step, after which the newest line of the logs is shown
STOP_SECONDS = 40.0  # seconds; a trainer ends by itself within 35
STALL_TIMEOUT = 300.0  # seconds without a new step; with ten other busy processes on two cores, a first step took 80


@dataclass
class DemoArguments(Flags, group="Demo"):
    """A collaboration of several trainers on one machine."""

    train_file: str | None = flag(None, "Text file to train on, UTF-8. Default: the documentation of Python")
    vocab_size: int = flag(2000, "Vocabulary size of the tokenizer, trained on the text. Lower it for short texts")
    trainers: int = flag(2, "Number of trainers. Each keeps one core busy", at_least=2)  # one cannot average
    max_global_steps: int = flag(10, "Stop after this many global steps", at_least=2)  # one shows no progress
    output_dir: str = flag("demo", "Folder for all output. The output of a previous demo in it is removed")
    debug: bool = flag(False, "Show the traceback of a fatal error")


def main() -> None:
    from cotrain.common.argument_parser import parse_arguments

    (args,) = parse_arguments([DemoArguments], __doc__)
    started = time.monotonic()
    with new_demo_folder(Path(args.output_dir)) as folder:
        workers = Workers(folder)
        with closing(workers):
            train_together(args, workers)
        print(f"\nDone in {time.monotonic() - started:.0f} s: {summarize(folder)}")


@contextmanager
def new_demo_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder for this demo, locked against other demos. The output of an earlier demo is removed."""
    check_target(folder, "--output_dir", overwrite=True, replaceable=(COMMANDS_FILE,))
    with lock_folder(folder, "--output_dir"):
        for path in folder.glob("[!.]*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (folder / COMMANDS_FILE).touch()
        yield folder


def train_together(args: DemoArguments, workers: Workers) -> None:
    """Prepare the data, start monitor and trainers, and wait until the trainers have completed all global steps."""
    folder = workers.folder
    data, tokenizer = quote(folder / "data" / "dataset"), quote(folder / "data" / "tokenizer")
    print("You can also run each command below yourself, in a separate terminal or on a separate machine.\n")
    print("1. Text and tokenizer (some 10 seconds, if the text is not long)")
    source = "--sample" if args.train_file is None else f"--train_file {quote(args.train_file)}"
    workers.start(
        "tokenize",
        f"tokenize_wikitext103.py {source} --train_tokenizer --vocab_size {args.vocab_size} --max_seq_length 128 "
        f"--output_path {data} --tokenizer_path {tokenizer} --cache_dir {quote(folder / 'data' / 'cache')}",
    )
    workers.wait_for(lambda: not workers.is_running("tokenize"), "the tokenized text", math.inf)

    print("2. The monitor, which states the settings of the run (some 10 seconds)")
    local = f"--host_maddrs /ip4/127.0.0.1/tcp/0 --tokenizer_path {tokenizer}"
    workers.start(
        "monitor",
        f"run_training_monitor.py --run_id demo {local} --output_dir {quote(folder / 'monitor')} "
        f"--model_name_or_path albert-tiny --learning_rate {LEARNING_RATE} --warmup_steps 0 "
        f"--target_batch_size {TARGET_BATCH_SIZE} --target_group_size {args.trainers} --matchmaking_time 3.5 "
        f"--refresh_period 1 --report_to trackio --sample_text 'The value of [MASK].' 'Return the [MASK].'",
    )
    peer_file = folder / "monitor" / "peer.json"
    workers.wait_for(peer_file.exists, "the address of the monitor")
    address = json.loads(peer_file.read_text(encoding="utf-8"))["initial_peers"][0]

    print(f"3. {args.trainers} trainers, which join through its address")
    trainers = [f"trainer-{number}" for number in range(1, args.trainers + 1)]
    for name in trainers:
        workers.start(
            name,
            f"run_trainer.py --initial_peers {address} --username {name} {local} --output_dir {quote(folder / name)} "
            f"--dataset_path {data} --use_cpu --dataloader_num_workers 0 --per_device_train_batch_size 16 "
            f"--gradient_accumulation_steps 1 --max_global_steps {args.max_global_steps} --leave_timeout 30",
        )

    print("4. Training (the first step takes longer: the trainers start)", flush=True)
    metrics, num_steps = folder / "monitor" / "metrics.jsonl", 0
    while any(map(workers.is_running, trainers)):
        workers.wait_for(
            lambda: len(read_records(metrics)) > num_steps or not any(map(workers.is_running, trainers)),  # noqa: B023
            "the next step",
        )
        steps = read_records(metrics)
        for step in steps[num_steps:]:
            loss = "unknown" if step["loss"] is None else f"{step['loss']:.3f}"
            print(
                f"Step {step['step']} of {args.max_global_steps}   loss {loss}   "
                f"{step['performance']:.0f} samples/s   {step['alive peers']} peers",
                flush=True,
            )
        num_steps = len(steps)
    workers.close()  # the monitor
    workers.check()


# --- processes -------------------------------------------------------------------------------------------------------


def quote(path: object) -> str:
    return shlex.quote(str(path))


def as_typed(command: str) -> str:
    """Return a command of this project for a shell in the current folder."""
    return f"{quote(os.path.relpath(SCRIPTS))}/{command}"


class Workers:
    """The demo's processes, with their output in NAME.log."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: dict[str, subprocess.Popen] = {}

    def is_running(self, name: str) -> bool:
        return self.processes[name].poll() is None

    def start(self, name: str, command: str) -> None:
        """Print a command line (script and flags, quoted for a shell), and start it on one core."""
        typed = f"OMP_NUM_THREADS=1 {as_typed(command)}\n"
        print(typed, flush=True)
        with open(self.folder / COMMANDS_FILE, "a", encoding="utf-8") as file:
            print(typed, file=file)
        script, *flags = shlex.split(command)
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(SCRIPTS / script), *flags],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=leave_with_parent,  # safe without threads, and this program has none
            )

    def wait_for(self, condition: Callable[[], object], what: str, timeout: float = STALL_TIMEOUT) -> None:
        """Wait until a condition is true; raise UserError if a process fails, or after `timeout` seconds."""
        started = said_at = time.monotonic()
        while not condition():
            self.check()
            now = time.monotonic()
            if now > started + timeout:
                raise UserError(f"timeout: waited {timeout:.0f} seconds for {what}; see the logs in {self.folder}")
            if now >= said_at + WORD_SECONDS:
                said_at = now
                print(f"   {now - started:.0f} s, waiting for {what}. Newest line: {self.newest_line()}", flush=True)
            time.sleep(0.1)
        self.check()

    def newest_line(self) -> str:
        """Return the last line of the log that was written last, and its name."""
        log = max(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        lines = log.read_text("utf-8", "replace").split("\n")
        return f"{log.stem}: {next((line for line in reversed(lines) if line.strip()), 'none yet')[-150:]}"

    def check(self) -> None:
        """Raise UserError with the last line of its output if a process has failed."""
        for name, process in self.processes.items():
            if code := process.poll():
                how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                log = self.folder / f"{name}.log"
                lines = [line for line in log.read_text("utf-8", "replace").splitlines() if not line.startswith(HINT)]
                reason = (lines or ["(empty)"])[-1].split(": error: ")[-1].strip()  # the format of errors.py
                raise UserError(f"{name} ended with {how}: {reason} (see {log})")

    def close(self) -> None:
        """Terminate the running processes, and kill those that have not ended within `STOP_SECONDS` seconds."""
        running = [process for name, process in self.processes.items() if self.is_running(name)]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in running:  # a second Ctrl-C ends the wait, and the processes with this one
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()  # its children end with it, see processes.py
            process.wait()


# --- result ----------------------------------------------------------------------------------------------------------


def summarize(folder: Path) -> str:
    """Return the result and commands to try next; raise UserError if no step was averaged or the loss did not fall."""
    from cotrain.monitoring.trackers import show_command  # a second

    monitor = folder / "monitor"
    steps, rounds = read_records(monitor / "metrics.jsonl"), read_records(folder / "trainer-1" / "rounds.jsonl")
    losses = [step["loss"] for step in steps if step["loss"] is not None]
    sizes = Counter(len(entry["group"]) for entry in rounds if entry["outcome"] == "averaged")
    if not sizes:
        raise UserError(f"no step was averaged by two trainers; search {folder}/trainer-*.log for 'Averag'")
    if len(losses) < 2 or losses[-1] >= losses[0]:
        values = ", ".join(f"{loss:.3f}" for loss in losses)
        raise UserError(f"the loss did not fall: {values}; see {folder}/*.log")
    counts = ", ".join(f"{number} x {size} peers" for size, number in sorted(sizes.items()))
    checkpoint = max(monitor.glob("checkpoint-*"), key=os.path.getmtime, default="none")
    curves = Path(os.environ.get("TRACKIO_DIR", monitor.resolve() / "trackio"))
    lines = [
        f"{len(steps)} steps",
        f"  Loss                {losses[0]:.3f} at first, {losses[-1]:.3f} at last",
        f"  Gradients averaged  {counts}",
        f"  Checkpoint          {checkpoint}",
        f"  Steps, as JSON      {monitor / 'metrics.jsonl'}",
        f"  Logs                {folder}/*.log",
        f"  Commands            {folder / COMMANDS_FILE}",
        "\nLook at the curves and try the model (which has learnt little in this short time):\n",
        f"  {show_command(curves, 'demo')}",
        f"  {as_typed(f'generate.py {quote(monitor)}')} 'The value of [MASK].'",
    ]
    if sys.prefix != sys.base_prefix:
        lines.insert(-2, f"  source {quote(Path(sys.prefix) / 'bin' / 'activate')}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
