#!/usr/bin/env python3
"""Fault-injection test: compare a run with faults to a quiet run.

In the run with faults, a monitor and three trainers are killed, frozen and restarted at random, one after the other,
while one peer sends NaN and another writes hostile records.

    python tests/support/chaos.py --steps 40

The script prints the figures. It exits with 1 if the global step decreased, a step took too long, the loss fell less
than in the quiet run, the peers' parameters differ, or a process was left running. `make soak` runs it.
"""

import argparse
import contextlib
import itertools
import math
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch

from lib.common.processes import guard_children
from lib.training.checkpoints import TrainingState, load_training_state
from tests.support.launcher import Launcher
from tests.support.peers import Script, Scripts, prepare_data, read_jsonl, steps_of, wait_until

MAX_SECONDS_A_STEP = 60
# Relative to the norm. Transfers use float16; a step of LAMB moves the weights by 0.03 of their norm here.
MAX_DIFFERENCE = 0.003
LOCAL_LEARNING_RATE = 0.003  # with local updates: of the inner optimizer, which takes some 20 steps in each global one
MAX_STEP = 10_000  # the hostile peer claims more
TRAINERS = ("one", "two", "three")


@dataclass
class Run:
    """One run of the collaboration, with or without faults.

    :param num_steps: global steps
    :param seed: seed of the choice of faults
    """

    scripts: Scripts
    num_steps: int
    seed: int
    max_events: float = math.inf
    local_updates: bool = False
    is_patient: bool = False  # inject a fault only while all peers are running
    max_difference: float = MAX_DIFFERENCE  # between the trainers' parameters at the end
    address: str = ""
    events: dict[str, int] = field(default_factory=dict)  # fault -> how often it was injected
    monitor: Script | None = None
    trainers: dict[str, Script] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)  # of trainers that received SIGTERM
    difference: float = math.inf  # between the trainers' parameters after the same step, when last measured

    def start(self, hostile: bool) -> None:
        self.start_monitor()
        self.address = self.monitor.address
        if hostile:  # before trainers report other steps
            self.scripts.start("tests/support/hostile_peer.py", "chaos", self.address, 50, log="hostile")
            self.scripts.trainer("poisoner", *self.trainer_args(), name_of_script="tests/support/nan_peer.py")
        for name in TRAINERS:
            self.start_trainer(name)

    def start_monitor(self) -> None:
        port = ("--host_maddrs", self.address.split("/p2p/")[0]) if self.address else ()
        self.monitor = self.scripts.monitor(
            "--run_id", "chaos", "--save_checkpoint_step_interval", 2, *port, *self.mode_args()
        )

    def mode_args(self) -> tuple:
        """Return the flags that the monitor and the trainers share."""
        return ("--local_updates", "--learning_rate", LOCAL_LEARNING_RATE) if self.local_updates else ()

    def trainer_args(self) -> tuple:
        """Return the flags of the trainers, the same for both runs.

        A global step takes eight seconds: a shorter one may end before the averaging of the previous step. A full
        group starts at once; an incomplete group waits for up to half a step.
        """
        return (
            "--run_id", "chaos", "--initial_peers", self.address, *steps_of(seconds=8, num_trainers=3),
            "--target_group_size", len(TRAINERS), "--averaging_timeout", 20,
            "--metadata_expiration", 20, "--max_refresh_period", 2, "--bootstrap_timeout", 60, "--save_steps", 50,
            "--backup_every_steps", 1, *self.mode_args(),
        )  # fmt: skip

    def start_trainer(self, name: str) -> None:
        self.trainers[name] = self.scripts.trainer(name, *self.trainer_args())

    def count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    def records(self) -> list[dict]:
        """Return the monitor's records, without the steps that the hostile peer claimed before trainers reported."""
        records = read_jsonl(self.scripts.folder / "monitor" / "metrics.jsonl")
        return [record for record in records if record["step"] <= MAX_STEP]

    def newest_step(self) -> int:
        """Return the newest global step in the trainers' logs."""
        steps = [re.findall(r"\bStep #(\d+)", trainer.output)[-1:] for trainer in self.trainers.values()]
        return max((int(step) for found in steps for step in found), default=0)

    def is_reported(self) -> bool:
        """Whether the monitor has reported the last step."""
        return any(record["step"] >= self.num_steps for record in self.records())

    def longest_step(self) -> float:
        """Return the seconds of the longest global step, by the first log line of any trainer for each step."""
        times: dict[int, float] = {}
        for trainer in self.trainers.values():
            for stamp, step in re.findall(r"(\S+ \d+ [\d:.]+) \[INFO\] Step #(\d+)$", trainer.log.read_text(), re.M):
                seconds = datetime.strptime(f"2000 {stamp}", "%Y %b %d %H:%M:%S.%f").timestamp()
                times[int(step)] = min(seconds, times.get(int(step), seconds))
        ordered = [times[step] for step in sorted(times)]
        return max((after - before for before, after in itertools.pairwise(ordered)), default=0.0)

    def harm(self, generator: random.Random) -> None:
        """Inject one random fault into one of the peers."""
        event = generator.choice(("kill a trainer", "freeze a trainer", "end a trainer", "kill the monitor"))
        self.count(event)
        if event == "kill the monitor":
            self.monitor.process.send_signal(signal.SIGKILL)
            self.monitor.wait()
            self.monitor.assert_nothing_left()
            self.start_monitor()
            return
        name = generator.choice(TRAINERS)
        trainer = self.trainers[name]
        trainer.family()
        if event == "freeze a trainer":
            trainer.process.send_signal(signal.SIGSTOP)
            time.sleep(generator.uniform(1, 8))
            trainer.process.send_signal(signal.SIGCONT)
            return
        trainer.process.send_signal(signal.SIGKILL if event == "kill a trainer" else signal.SIGTERM)
        code = trainer.wait(30)
        if event == "end a trainer":
            self.exit_codes.append(code)
        trainer.assert_nothing_left()
        self.start_trainer(name)

    def may_harm(self) -> bool:
        if sum(self.events.values()) >= self.max_events:
            return False
        return not self.is_patient or (
            "--initial_peers" in self.monitor.output
            and all("Local step 1:" in trainer.output for trainer in self.trainers.values())
        )

    def run(self, deadline: float, harm_every: float | None) -> None:
        """Run until the last step, with a fault every `harm_every` seconds on average (None: no faults).

        :param deadline: `time.monotonic` at which the run is given up
        """
        generator = random.Random(self.seed)
        next_harm = time.monotonic() + 15
        while self.newest_step() < self.num_steps and time.monotonic() < deadline:
            is_ending = self.newest_step() >= self.num_steps - 3  # a killed peer would have no time to rejoin
            if is_ending:
                self.end_hostile_peers()
            elif harm_every is not None and time.monotonic() >= next_harm and self.may_harm():
                self.harm(generator)
                next_harm = time.monotonic() + generator.uniform(0.5, 1.5) * harm_every
            time.sleep(0.2)
        # Wait until all trainers have the same parameters and the monitor has reported the last step.
        while not (self.is_reported() and self.are_together()) and time.monotonic() < deadline:
            time.sleep(0.1)

    def are_together(self) -> bool:
        """Whether all trainers have the same parameters after the same step.

        A trainer that was away needs one or two rounds with the whole group for that.
        """
        paths = [self.scripts.folder / name / "backup.pt" for name in TRAINERS]
        if not all(path.exists() for path in paths):
            return False
        backups = [load_training_state(path, "chaos") for path in paths]
        if len({backup.step for backup in backups}) > 1:
            return False
        self.difference = largest_difference(backups)
        return self.difference <= self.max_difference

    def end_hostile_peers(self) -> None:
        """Kill the hostile peers. Each restarted trainer loses one or two rounds before it bans the peer with NaN."""
        for script in self.scripts.running:
            if script not in (*self.trainers.values(), self.monitor) and script.process.poll() is None:
                script.kill_all()

    def finish(self) -> list[int]:
        """Stop all trainers at once, so that none continues alone, and then the monitor.

        :returns: their exit codes, and those of the trainers that were ended before
        """
        for trainer in self.trainers.values():
            trainer.family()
            trainer.process.send_signal(signal.SIGTERM)
        codes = [trainer.wait(30) for trainer in self.trainers.values()]
        return [*self.exit_codes, *codes, self.monitor.stop()]

    def left_running(self) -> list[psutil.Process]:
        """Return the processes that have not ended within 15 seconds."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self._family(), 15, "the end of all")
        return self._family()

    def _family(self) -> list[psutil.Process]:
        return [process for script in self.scripts.running for process in script.family()]

    def print_last_lines(self, number: int = 15) -> None:
        """Print the last lines of the logs of the monitor and each trainer."""
        for script in (self.monitor, *self.trainers.values()):
            print(f"  {script.log.name}:", *script.output.splitlines()[-number:], sep="\n    ")


def largest_difference(states: list[TrainingState]) -> float:
    """Return the largest difference between the parameters of any two states, relative to their norm."""
    vectors = []
    for state in states:
        statistics = [entry for entry in state.metadata["optimizer_metadata"] if entry["type"] == "tensor"]
        vectors.append(torch.cat([tensor.flatten() for tensor in state.tensors[: -len(statistics)]]))
    return max(((one - other).norm() / one.norm()).item() for one, other in itertools.combinations(vectors, 2))


def check(run: Run, codes: list[int]) -> list[str]:
    """Return the problems of a run, and print its figures."""
    steps = [record["step"] for record in run.records()]
    slowest = run.longest_step()
    problems = []
    if max(steps, default=0) < run.num_steps:
        problems.append(f"it came to step {max(steps, default=0)} of {run.num_steps} only")
    if steps != sorted(set(steps)):
        problems.append(f"steps went back or were repeated: {steps}")
    if slowest > MAX_SECONDS_A_STEP:
        problems.append(f"a step took {slowest:.0f} seconds")
    if any(codes):
        problems.append(f"exit codes {codes}")
    if run.difference > run.max_difference:
        problems.append(f"the parameters differ by {run.difference:.1%}")
    if left := run.left_running():
        problems.append(f"left running: {left}")
    logs = [script.log for script in (run.monitor, *run.trainers.values())]  # restarted peers append to the log
    traces = [log.name for log in logs if "Traceback" in log.read_text(errors="replace")]
    if traces:
        problems.append(f"tracebacks in {traces}")
    print(f"  steps {len(steps)}, slowest {slowest:.1f} s, parameters differ by {run.difference:.1%}")
    print(f"  events {run.events or 'none'}, exit codes {codes}")
    return problems


def losses(run: Run) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in run.records() if record["loss"] is not None}


def play(
    folder: Path, data: Path, num_steps: int, seed: int, harm_every: float | None, seconds: float,
    launcher: Launcher | None = None, **options,
) -> tuple[Run, list[str]]:  # fmt: skip
    """Run the collaboration from start to end.

    :param seconds: timeout of the run
    :param launcher: see Scripts
    :returns: the run, and its problems
    """
    folder.mkdir(parents=True)
    run = Run(Scripts(folder, data, launcher=launcher), num_steps, seed, **options)
    try:
        run.start(hostile=harm_every is not None)
        run.run(time.monotonic() + seconds, harm_every)
        codes = run.finish()
        problems = check(run, codes)
        if problems:
            run.print_last_lines()
        return run, problems
    finally:
        run.scripts.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="global steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="decides what is done to whom")
    parser.add_argument("--harm_every", type=float, default=12.0, help="seconds between two harms, on average")
    parser.add_argument("--seconds", type=float, default=1500.0, help="give up on a run after this time")
    parser.add_argument("--local_updates", action="store_true", help="train with local updates")
    parser.add_argument("--folder", type=Path, default=None, help="where the logs go; default: a temporary one")
    args = parser.parse_args()
    guard_children()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    prepare_data(folder)
    print(f"Logs in {folder}\nQuiet run:", flush=True)
    options = {"local_updates": args.local_updates}
    quiet, problems = play(folder / "quiet", folder, args.steps, args.seed, None, args.seconds, **options)
    print("Run under fire:", flush=True)
    chaos, more = play(folder / "chaos", folder, args.steps, args.seed, args.harm_every, args.seconds, **options)
    problems += more
    last = min(max(losses(quiet)), max(losses(chaos)))
    falls = [losses(run)[min(losses(run))] - losses(run)[last] for run in (quiet, chaos)]
    print(f"Loss at step {last}: quiet {losses(quiet)[last]:.4f}, under fire {losses(chaos)[last]:.4f}")
    print(f"Fall of the loss: quiet {falls[0]:.4f}, under fire {falls[1]:.4f} ({falls[1] / falls[0]:.0%})")
    if falls[1] < 0.8 * falls[0]:
        problems.append("the loss fell less than in the quiet run")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
