#!/usr/bin/env python3
"""A run under fire: a monitor and three trainers are killed, frozen and restarted at random, one after the other,
while one peer sends NaN and another writes hostile records. Beside it, the same run in peace.

    python tests/chaos.py --steps 40

Prints the figures, and exits with 1 if the step went back, a step took too long, the loss did not fall as in the quiet
run, the peers' parameters differ, or something was left running. `make soak` runs it.
"""

import argparse
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from safetensors.torch import load_file

from checkpoints import list_checkpoints
from processes import guard_children
from tests.peers import Script, Scripts, prepare_data

MAX_SECONDS_A_STEP = 60
# LAMB moves weights by learning rate x norm a step, 0.03 here: two peers that took their last step with different
# gradients, and have not averaged it yet, differ by as much; what differs by more has drifted apart.
MAX_DIFFERENCE = 0.06
TRAINERS = ("one", "two", "three")


@dataclass
class Run:
    """One run of the collaboration, and what was done to it."""

    scripts: Scripts
    num_steps: int
    seed: int
    address: str = ""
    events: dict[str, int] = field(default_factory=dict)
    monitor: Script | None = None
    trainers: dict[str, Script] = field(default_factory=dict)
    step_times: dict[int, float] = field(default_factory=dict)

    def start(self, hostile: bool) -> None:
        self.start_monitor()
        self.address = self.monitor.address
        for name in TRAINERS:
            self.start_trainer(name)
        if hostile:
            # A monitor that has seen no step yet believes the first peers that it sees, whoever they are.
            self.monitor.wait_for(r"Step #1\t", 120)
            self.scripts.start("tests/hostile_peer.py", "chaos", self.address, 50, log="hostile")
            self.scripts.trainer("poisoner", *self.trainer_args(), name_of_script="tests/nan_peer.py")

    def start_monitor(self) -> None:
        port = ("--host_maddrs", self.address.split("/p2p/")[0]) if self.address else ()
        self.monitor = self.scripts.monitor("--run_id", "chaos", "--save_checkpoint_step_interval", 2, *port)

    def trainer_args(self) -> tuple:
        """A step of some ten seconds: shorter ones are over before the averaging of the last is."""
        return (
            "--run_id", "chaos", "--initial_peers", self.address, "--target_batch_size", 12288,
            "--per_device_train_batch_size", 16, "--target_group_size", 3, "--averaging_timeout", 20,
            "--metadata_expiration", 20, "--bootstrap_timeout", 60, "--save_steps", 50, "--backup_every_steps", 2,
        )  # fmt: skip

    def start_trainer(self, name: str) -> None:
        end = ("--max_global_steps", self.num_steps)
        self.trainers[name] = self.scripts.trainer(name, *self.trainer_args(), *end)

    def count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    def records(self) -> list[dict]:
        path = self.scripts.folder / "monitor" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def watch(self) -> int:
        """Note when each step was first seen; return the newest."""
        for record in self.records():
            self.step_times.setdefault(record["step"], record["time"])
        return max(self.step_times, default=0)

    def harm(self, generator: random.Random) -> None:
        """Do one thing to one of the peers."""
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
        trainer.wait(30)
        trainer.assert_nothing_left()
        self.start_trainer(name)

    def run(self, deadline: float, harm_every: float | None) -> None:
        """Until the last step, with something done to it every `harm_every` seconds on average."""
        generator = random.Random(self.seed)
        next_harm = time.monotonic() + 15
        while self.watch() < self.num_steps and time.monotonic() < deadline:
            is_ending = self.watch() >= self.num_steps - 2  # who is killed now would have no time to come back
            if harm_every is not None and time.monotonic() >= next_harm and not is_ending:
                self.harm(generator)
                next_harm = time.monotonic() + generator.uniform(0.5, 1.5) * harm_every
            time.sleep(0.2)

    def finish(self) -> list[int]:
        """Let the trainers leave after their last step and stop the monitor; return all exit codes."""
        codes = [trainer.wait(120) for trainer in self.trainers.values()]
        codes.append(self.monitor.stop())
        for script in self.scripts.running:
            if script not in (*self.trainers.values(), self.monitor):
                script.kill_all()  # the hostile ones
        return codes

    def largest_difference(self) -> float:
        """Between the parameters of any two trainers at the end, relative to their norm."""
        vectors = []
        for name in TRAINERS:
            weights = load_file(list_checkpoints(self.scripts.folder / name)[0] / "model.safetensors")
            vectors.append(torch.cat([weights[key].flatten() for key in sorted(weights)]))
        pairs = itertools.combinations(vectors, 2)
        return max(((one - other).norm() / one.norm()).item() for one, other in pairs)


def check(run: Run, codes: list[int]) -> list[str]:
    """What is wrong with a run; empty if nothing."""
    steps = [record["step"] for record in run.records()]
    times = [run.step_times[step] for step in sorted(run.step_times)]
    slowest = max((after - before for before, after in itertools.pairwise(times)), default=0.0)
    problems = []
    if max(steps, default=0) < run.num_steps:
        problems.append(f"it came to step {max(steps, default=0)} of {run.num_steps} only")
    if steps != sorted(set(steps)):
        problems.append(f"steps went back or were repeated: {steps}")
    if slowest > MAX_SECONDS_A_STEP:
        problems.append(f"a step took {slowest:.0f} seconds")
    if any(codes):
        problems.append(f"exit codes {codes}")
    difference = run.largest_difference()
    if difference > MAX_DIFFERENCE:
        problems.append(f"the parameters differ by {difference:.1%}")
    left = [process for script in run.scripts.running for process in script.family()]
    if left:
        problems.append(f"left running: {left}")
    traces = [script.log.name for script in (run.monitor, *run.trainers.values()) if "Traceback" in script.output]
    if traces:
        problems.append(f"tracebacks in {traces}")
    print(f"  steps {len(steps)}, slowest {slowest:.1f} s, parameters differ by {difference:.1%}")
    print(f"  events {run.events or 'none'}, exit codes {codes}")
    return problems


def losses(run: Run) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in run.records() if record["loss"] is not None}


def play(folder: Path, data: Path, num_steps: int, seed: int, harm_every: float | None, seconds: float) -> tuple:
    """One run from start to end: the run, and what is wrong with it."""
    folder.mkdir(parents=True)
    run = Run(Scripts(folder, data), num_steps, seed)
    try:
        run.start(hostile=harm_every is not None)
        run.run(time.monotonic() + seconds, harm_every)
        codes = run.finish()
        time.sleep(3)
        return run, check(run, codes)
    finally:
        run.scripts.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="global steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="decides what is done to whom")
    parser.add_argument("--harm_every", type=float, default=12.0, help="seconds between two harms, on average")
    parser.add_argument("--seconds", type=float, default=1500.0, help="give up on a run after this time")
    parser.add_argument("--folder", type=Path, default=None, help="where the logs go; default: a temporary one")
    args = parser.parse_args()
    guard_children()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    prepare_data(folder)
    print(f"Logs in {folder}\nQuiet run:", flush=True)
    quiet, problems = play(folder / "quiet", folder, args.steps, args.seed, None, args.seconds)
    print("Run under fire:", flush=True)
    chaos, more = play(folder / "chaos", folder, args.steps, args.seed, args.harm_every, args.seconds)
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
