#!/usr/bin/env python3
"""Long runs: one under fault injection, compared with a quiet one, and one that must not grow.

    python tests/support/soak.py faults --steps 40
    python tests/support/soak.py leaks --steps 500

`faults`: a monitor and three trainers are killed, frozen and restarted at random, one after the other, while one peer
sends NaN and another writes hostile records. Problems are a global step that decreased or took too long, a loss that
fell less than in the quiet run, peers whose parameters differ, and processes that were left.

`leaks`: memory, threads, file descriptors and processes of a monitor and a trainer, while another trainer joins and
leaves every few steps. Problems are figures that grew after the first fifth of the run.

The script prints figures and problems, and exits with 1 if there is a problem. `make soak` runs both.
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
from collections import Counter
from dataclasses import dataclass, field
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
FAULTS = ("kill a trainer", "freeze a trainer", "end a trainer", "kill the monitor")
PACE = 0.05  # seconds for a micro-batch of `leaks`; a global step takes less than a second
# Largest growth allowed from the warm-up to the end: a factor, and an absolute amount that counts as noise
LIMITS = {"memory MB": (1.2, 60.0), "threads": (1.1, 6), "file descriptors": (1.1, 12), "processes": (1.0, 1)}


@dataclass
class Run:
    """A run of a monitor and three trainers, with or without faults.

    :param num_steps: global steps
    :param seed: seed of the choice of faults
    :param is_patient: inject a fault only while all peers are running
    :param max_difference: between the trainers' parameters at the end
    """

    scripts: Scripts
    num_steps: int
    seed: int = 0
    max_faults: float = math.inf
    local_updates: bool = False
    is_patient: bool = False
    max_difference: float = MAX_DIFFERENCE
    address: str = ""
    faults: Counter = field(default_factory=Counter)
    monitor: Script | None = None
    trainers: dict[str, Script] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)  # of peers that received SIGTERM
    difference: float = math.inf  # between the trainers' parameters after the same step, when last measured

    def start(self, hostile: bool) -> None:
        self.start_monitor()
        self.address = self.monitor.address
        if hostile:  # before trainers report other steps
            self.scripts.start("tests/support/hostile_peer.py", "soak", self.address, 50, log="hostile")
            self.scripts.trainer("poisoner", *self.flags(), env={"SEND_NAN": "1"})
        for name in TRAINERS:
            self.trainers[name] = self.scripts.trainer(name, *self.flags())

    def start_monitor(self) -> None:
        port = ("--host_maddrs", self.address.split("/p2p/")[0]) if self.address else ()
        flags = ("--run_id", "soak", "--save_checkpoint_step_interval", 2, *port, *self.mode_flags())
        self.monitor = self.scripts.monitor(*flags)

    def mode_flags(self) -> tuple:
        return ("--local_updates", "--learning_rate", LOCAL_LEARNING_RATE) if self.local_updates else ()

    def flags(self) -> tuple:
        """Return the flags of the trainers.

        A global step takes eight seconds: a shorter one may end before the averaging of the previous step. A full
        group starts at once; an incomplete group waits for up to half a step.
        """
        return (
            "--run_id", "soak", "--initial_peers", self.address, *steps_of(seconds=8, num_trainers=3),
            "--target_group_size", len(TRAINERS), "--averaging_timeout", 20,
            "--metadata_expiration", 20, "--max_refresh_period", 2, "--bootstrap_timeout", 60, "--save_steps", 50,
            "--backup_every_steps", 1, *self.mode_flags(),
        )  # fmt: skip

    def records(self) -> list[dict]:
        """Return the monitor's records, without the steps that the hostile peer claimed before trainers reported."""
        return [record for record in self.scripts.metrics() if record["step"] <= MAX_STEP]

    def losses(self) -> dict[int, float]:
        return {record["step"]: record["loss"] for record in self.records() if record["loss"] is not None}

    def begun_at(self) -> dict[int, float]:
        """Return the time at which the first trainer completed each step."""
        times: dict[int, float] = {}
        for name in TRAINERS:
            for entry in read_jsonl(self.scripts.folder / name / "rounds.jsonl"):
                times[entry["step"]] = min(entry["time"], times.get(entry["step"], math.inf))
        return times

    def newest_step(self) -> int:
        return max(self.begun_at(), default=0)

    def harm(self, generator: random.Random) -> None:
        """Inject one random fault into one of the peers."""
        fault = generator.choice(FAULTS)
        self.faults[fault] += 1
        if fault == "kill the monitor":
            self.monitor.kill()
            self.start_monitor()
            return
        name = generator.choice(TRAINERS)
        trainer = self.trainers[name]
        if fault == "freeze a trainer":
            trainer.freeze(generator.uniform(1, 8))
            return
        if fault == "kill a trainer":
            trainer.kill()
        else:
            self.exit_codes.append(trainer.stop(timeout=30))
            trainer.assert_nothing_left()
        self.trainers[name] = self.scripts.trainer(name, *self.flags())

    def may_harm(self) -> bool:
        if self.faults.total() >= self.max_faults:
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
        while (step := self.newest_step()) < self.num_steps and time.monotonic() < deadline:
            if step >= self.num_steps - 3:  # a killed peer would have no time to rejoin
                self.end_hostile_peers()
            elif harm_every is not None and time.monotonic() >= next_harm and self.may_harm():
                self.harm(generator)
                next_harm = time.monotonic() + generator.uniform(0.5, 1.5) * harm_every
            time.sleep(0.2)
        while not (max(self.losses(), default=0) >= self.num_steps and self.are_together()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)

    def are_together(self) -> bool:
        """Whether all trainers have the same parameters after the same step.

        A trainer that was away needs one or two rounds with the whole group for that.
        """
        paths = [self.scripts.folder / name / "backup.pt" for name in TRAINERS]
        if not all(path.exists() for path in paths):
            return False
        backups = [load_training_state(path, "soak") for path in paths]
        if len({backup.step for backup in backups}) > 1:
            return False
        self.difference = largest_difference(backups)
        return self.difference <= self.max_difference

    def end_hostile_peers(self) -> None:
        """Kill the hostile peers. Each restarted trainer loses one or two rounds before it bans the peer with NaN."""
        for script in self.scripts.running:
            if script not in (*self.trainers.values(), self.monitor) and script.process.poll() is None:
                script.kill_all()

    def finish(self) -> None:
        """Stop all trainers at once, so that none continues alone, and then the monitor."""
        for trainer in self.trainers.values():
            trainer.process.send_signal(signal.SIGTERM)
        self.exit_codes += [trainer.wait(30) for trainer in self.trainers.values()]
        self.exit_codes.append(self.monitor.stop())

    def left_running(self) -> list[psutil.Process]:
        """Return the processes that have not ended within 15 seconds."""

        def alive() -> list[psutil.Process]:
            return [process for script in self.scripts.running for process in script.family()]

        with contextlib.suppress(AssertionError):
            wait_until(lambda: not alive(), 15, "the end of all")
        return alive()

    def find_problems(self) -> list[str]:
        """Return the problems of the run, and print its figures."""
        steps, times = [record["step"] for record in self.records()], self.begun_at()
        ordered = [times[step] for step in sorted(times)]
        slowest = max((after - before for before, after in itertools.pairwise(ordered)), default=0.0)
        peers = (self.monitor, *self.trainers.values())
        traces = [peer.log.name for peer in peers if "Traceback" in peer.log.read_text(errors="replace")]
        left = self.left_running()
        print(f"  steps {len(steps)}, slowest {slowest:.1f} s, parameters differ by {self.difference:.1%}")
        print(f"  faults {dict(self.faults)}, exit codes {self.exit_codes}")
        problems = {
            f"it came to step {max(steps, default=0)} of {self.num_steps} only": max(steps, default=0)
            < self.num_steps,
            f"steps went back or were repeated: {steps}": steps != sorted(set(steps)),
            f"a step took {slowest:.0f} seconds": slowest > MAX_SECONDS_A_STEP,
            f"exit codes {self.exit_codes}": any(self.exit_codes),
            f"the parameters differ by {self.difference:.1%}": self.difference > self.max_difference,
            f"left running: {left}": bool(left),
            f"tracebacks in {traces}": bool(traces),
        }
        return [problem for problem, is_there in problems.items() if is_there]


def largest_difference(states: list[TrainingState]) -> float:
    """Return the largest difference between the parameters of any two states, relative to their norm."""
    vectors = []
    for state in states:
        statistics = [entry for entry in state.metadata["optimizer_metadata"] if entry["type"] == "tensor"]
        vectors.append(torch.cat([tensor.flatten() for tensor in state.tensors[: -len(statistics)]]))
    return max(((one - other).norm() / one.norm()).item() for one, other in itertools.combinations(vectors, 2))


def play(
    folder: Path, data: Path, harm_every: float | None, seconds: float, launcher: Launcher | None = None, **options
) -> tuple[Run, list[str]]:
    """Play a run from start to end.

    :param seconds: timeout of the run
    :param launcher: see Scripts
    :param options: of Run
    :returns: the run, and its problems
    """
    folder.mkdir(parents=True)
    run = Run(Scripts(folder, data, launcher=launcher), **options)
    try:
        run.start(hostile=harm_every is not None)
        run.run(time.monotonic() + seconds, harm_every)
        run.finish()
        return run, run.find_problems()
    finally:
        run.scripts.close()


def inject_faults(folder: Path, args: argparse.Namespace) -> list[str]:
    options = {"num_steps": args.steps, "seed": args.seed, "local_updates": args.local_updates}
    print("Quiet run:", flush=True)
    quiet, problems = play(folder / "quiet", folder, None, args.seconds, **options)
    print("Run under fire:", flush=True)
    harmed, more = play(folder / "harmed", folder, args.harm_every, args.seconds, **options)
    last = min(max(run.losses()) for run in (quiet, harmed))
    falls = [losses[min(losses)] - losses[last] for losses in (quiet.losses(), harmed.losses())]
    print(f"Fall of the loss: quiet {falls[0]:.4f}, under fire {falls[1]:.4f} ({falls[1] / falls[0]:.0%})")
    fell = ["the loss fell less than in the quiet run"] if falls[1] < 0.8 * falls[0] else []
    return [*problems, *more, *fell]


def measure(script: Script) -> dict[str, float]:
    """Measure a script and all its processes.

    Memory is anonymous and shared memory, with each page counted once. Pages of files are excluded: their share
    depends on the other processes that have them open.
    """
    total = dict.fromkeys(LIMITS, 0.0)
    for process in script.family():
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total["memory MB"] += sum(map(int, re.findall(r"Pss_(?:Anon|Shmem): +(\d+) kB", rollup))) / 2**10
            total["threads"] += process.num_threads()
            total["file descriptors"] += process.num_fds()
            total["processes"] += 1
    return total


def find_leaks(folder: Path, args: argparse.Namespace) -> list[str]:
    with contextlib.closing(Scripts(folder, folder)) as scripts:
        monitor = scripts.monitor("--save_checkpoint_step_interval", 5)
        steps = steps_of(seconds=0.8, num_trainers=1, pace=PACE)
        common = ("--initial_peers", monitor.address, *steps, "--averaging_timeout", 10, "--metadata_expiration", 20,
                  "--backup_every_steps", 5, "--save_steps", 200)  # fmt: skip
        trainer, guest = scripts.trainer("stays", *common, pace=PACE), None
        watched, deadline = {"monitor": monitor, "trainer": trainer}, time.monotonic() + args.seconds
        rows: list[tuple[int, dict]] = []
        print(f"{'step':>5} {'peer':>8} " + " ".join(f"{name:>16}" for name in LIMITS), flush=True)
        while (
            step := max((entry["step"] for entry in read_jsonl(folder / "stays/rounds.jsonl")), default=0)
        ) < args.steps:
            assert time.monotonic() < deadline, f"only step {step} after {args.seconds} seconds"
            assert all(script.process.poll() is None for script in watched.values()), "a peer has ended"
            if guest is None or guest.process.poll() is not None:
                flags = (*common, "--max_global_steps", step + 10, "--leave_timeout", 0)
                guest = scripts.trainer("guest", *flags, pace=PACE)
            if not rows or step >= rows[-1][0] + args.steps // 20:
                rows.append((step, {name: measure(script) for name, script in watched.items()}))
                for name, values in rows[-1][1].items():
                    print(
                        f"{step:>5} {name:>8} " + " ".join(f"{value:>16.0f}" for value in values.values()), flush=True
                    )
            time.sleep(0.5)

    def least(name: str, what: str, first: float, last: float) -> float:
        """Return the minimum of a figure in a part of the run: temporary growth with a guest does not count."""
        return min(peers[name][what] for step, peers in rows if first * args.steps <= step <= last * args.steps)

    problems = []
    for name, (what, (factor, noise)) in itertools.product(watched, LIMITS.items()):
        before, after = least(name, what, 0.2, 0.4), least(name, what, 0.8, 1.0)
        if after > max(before * factor, before + noise):
            problems.append(f"{what} of the {name} grew from {before:.0f} to {after:.0f}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("faults", "leaks"))
    parser.add_argument("--steps", type=int, required=True, help="global steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="decides which faults which peers have")
    parser.add_argument("--harm_every", type=float, default=12.0, help="seconds between two faults, on average")
    parser.add_argument("--seconds", type=float, default=3000.0, help="give up on a run after this time")
    parser.add_argument("--local_updates", action="store_true", help="train with local updates")
    args = parser.parse_args()
    guard_children()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    prepare_data(folder)
    print(f"Logs in {folder}", flush=True)
    problems = {"faults": inject_faults, "leaks": find_leaks}[args.kind](folder, args)
    print("\n".join(f"PROBLEM: {problem}" for problem in problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
