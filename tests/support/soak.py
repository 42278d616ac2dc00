#!/usr/bin/env python3
"""Long runs: one under fault injection, compared with a quiet one, and one that must not grow.

    python tests/support/soak.py faults --steps 40
    python tests/support/soak.py leaks --steps 500

`faults`: a monitor and three trainers are killed, frozen and restarted at random, one after the other, while one peer
sends NaN and another writes hostile records. It fails if a global step decreased or took too long, if the loss fell
less than in the quiet run, if the parameters of the peers differ, or if processes are left.

`leaks`: memory, threads, file descriptors and processes of a monitor and a trainer, while another trainer joins and
leaves every few steps. It fails if one of these figures grew after the first fifth of the run.

`make soak` runs both.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch

from cotrain.common.processes import guard_children
from cotrain.training.checkpoints import TrainingState, load_training_state
from tests.support.peers import Script, Scripts, prepare_data, read_jsonl, steps_of, wait_until

MAX_SECONDS_A_STEP = 60
# Relative to the norm. Transfers use float16; a step of LAMB moves the weights by 0.03 of their norm here.
MAX_DIFFERENCE = 0.003
MAX_SECONDS = 3000  # after which a run is given up
HARM_EVERY = 12.0  # seconds between two faults, on average
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
    """

    scripts: Scripts
    num_steps: int
    address: str = ""  # of the monitor
    monitor: Script | None = None
    trainers: dict[str, Script] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)  # of peers that received SIGTERM

    def start(self, hostile: bool) -> None:
        self.start_monitor()
        self.address = self.monitor.address
        if hostile:  # before trainers report other steps
            self.scripts.start("tests/support/hostile_peer.py", "soak", self.address, log="hostile")
            self.scripts.trainer("poisoner", *self.flags(), env={"SEND_NAN": "1"})
        for name in TRAINERS:
            self.trainers[name] = self.scripts.trainer(name, *self.flags())

    def start_monitor(self) -> None:
        port = ("--host_maddrs", self.address.split("/p2p/")[0]) if self.address else ()
        flags = ("--run_id", "soak", "--save_checkpoint_step_interval", 2, *port)
        self.monitor = self.scripts.monitor(*flags)

    def flags(self) -> tuple:
        """Return the flags of the trainers.

        A global step takes eight seconds: a shorter one may end before the averaging of the previous step. A full
        group starts at once; an incomplete group waits for up to half a step.
        """
        return (
            "--run_id", "soak", "--initial_peers", self.address, *steps_of(seconds=8, num_trainers=3),
            "--target_group_size", len(TRAINERS), "--averaging_timeout", 20,
            "--metadata_expiration", 20, "--max_refresh_period", 2, "--bootstrap_timeout", 60, "--save_steps", 50,
            "--backup_every_steps", 1,
        )  # fmt: skip

    def losses(self) -> dict[int, float]:
        """Return the losses in the monitor's records, without the steps that only the hostile peer claimed."""
        return {record["step"]: record["loss"] for record in self.scripts.metrics() if record["step"] <= MAX_STEP}

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
        print(f"  step {self.newest_step()}: {fault}", flush=True)
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

    def run(self, deadline: float, with_faults: bool) -> None:
        """Run until the last step, with a fault every `HARM_EVERY` seconds on average if `with_faults` is set.

        :param deadline: `time.monotonic` at which the run is given up
        """
        generator = random.Random(0)  # of the faults
        next_harm = time.monotonic() + 15
        while (step := self.newest_step()) < self.num_steps and time.monotonic() < deadline:
            if step >= self.num_steps - 3:  # a killed peer would have no time to rejoin
                self.end_hostile_peers()
            elif with_faults and time.monotonic() >= next_harm:
                self.harm(generator)
                next_harm = time.monotonic() + generator.uniform(0.5, 1.5) * HARM_EVERY
            time.sleep(0.2)
        assert step >= self.num_steps, f"only step {step}"
        wait_until(self.are_together, deadline - time.monotonic(), "the same parameters in all trainers")
        wait_until(lambda: max(self.losses()) >= self.num_steps, 60, "the monitor's report of the last step")

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
        return largest_difference(backups) <= MAX_DIFFERENCE

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
        for script in self.scripts.running:
            script.assert_nothing_left()

    def check(self) -> None:
        """Print the figures of the run, and check them.

        :raises AssertionError: if one is bad
        """
        steps = [record["step"] for record in self.scripts.metrics() if record["step"] <= MAX_STEP]
        times = [moment for _, moment in sorted(self.begun_at().items())]
        slowest = max(after - before for before, after in itertools.pairwise(times))
        print(f"  steps {len(steps)}, slowest {slowest:.1f} s", flush=True)
        assert steps == sorted(set(steps)), f"repeated: {steps}"
        assert slowest <= MAX_SECONDS_A_STEP
        assert not any(self.exit_codes), self.exit_codes
        for peer in (self.monitor, *self.trainers.values()):
            assert "Traceback" not in peer.log.read_text(errors="replace"), peer.log


def largest_difference(states: list[TrainingState]) -> float:
    """Return the largest difference between the parameters of any two states, relative to their norm."""
    vectors = []
    for state in states:
        statistics = [entry for entry in state.metadata["optimizer_metadata"] if entry["type"] == "tensor"]
        vectors.append(torch.cat([tensor.flatten() for tensor in state.tensors[: -len(statistics)]]))
    return max(((one - other).norm() / one.norm()).item() for one, other in itertools.combinations(vectors, 2))


def play(folder: Path, data: Path, num_steps: int, with_faults: bool) -> dict[int, float]:
    """Play a run from start to end, and return its losses.

    :raises AssertionError: if there was a problem
    """
    folder.mkdir()
    with contextlib.closing(Scripts(folder, data)) as scripts:
        run = Run(scripts, num_steps)
        run.start(hostile=with_faults)
        run.run(time.monotonic() + MAX_SECONDS, with_faults)
        run.finish()
        run.check()
        return run.losses()


def inject_faults(folder: Path, num_steps: int) -> None:
    print("Quiet run:", flush=True)
    quiet = play(folder / "quiet", folder, num_steps, with_faults=False)
    print("Run under fire:", flush=True)
    harmed = play(folder / "harmed", folder, num_steps, with_faults=True)
    last = min(max(quiet), max(harmed))
    falls = [losses[min(losses)] - losses[last] for losses in (quiet, harmed)]
    print(f"Fall of the loss: quiet {falls[0]:.4f}, under fire {falls[1]:.4f} ({falls[1] / falls[0]:.0%})")
    assert falls[1] >= 0.8 * falls[0]


def measure(script: Script) -> dict[str, int]:
    """Measure a script and all its processes.

    Memory is anonymous and shared memory, with each page counted once. Pages of files are excluded: their share
    depends on the other processes that have them open.
    """
    total = dict.fromkeys(LIMITS, 0)
    for process in script.family():
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total["memory MB"] += sum(map(int, re.findall(r"Pss_(?:Anon|Shmem): +(\d+) kB", rollup))) // 2**10
            total["threads"] += process.num_threads()
            total["file descriptors"] += process.num_fds()
            total["processes"] += 1
    return total


def find_leaks(folder: Path, num_steps: int) -> None:
    rows: list[dict] = []  # step, and the figures of each peer
    with contextlib.closing(Scripts(folder, folder)) as scripts:
        monitor = scripts.monitor("--save_checkpoint_step_interval", 5)
        steps = steps_of(seconds=0.8, num_trainers=1, pace=PACE)
        common = ("--initial_peers", monitor.address, *steps, "--averaging_timeout", 10, "--metadata_expiration", 20,
                  "--backup_every_steps", 5, "--save_steps", 200)  # fmt: skip
        trainer, guest = scripts.trainer("stays", *common, pace=PACE), None
        deadline, step = time.monotonic() + MAX_SECONDS, 0
        while step < num_steps:
            step = max((entry["step"] for entry in read_jsonl(folder / "stays/rounds.jsonl")), default=0)
            assert time.monotonic() < deadline, f"only step {step} after {MAX_SECONDS} seconds"
            assert monitor.process.poll() is None and trainer.process.poll() is None, "a peer has ended"
            if guest is None or guest.process.poll() is not None:
                flags = (*common, "--max_global_steps", step + 10, "--leave_timeout", 0)
                guest = scripts.trainer("guest", *flags, pace=PACE)
            if not rows or step >= rows[-1]["step"] + num_steps // 20:
                rows.append({"step": step, "monitor": measure(monitor), "trainer": measure(trainer)})
                print(rows[-1], flush=True)
            time.sleep(0.5)

    def least(name: str, what: str, first: float, last: float) -> float:
        """Return the minimum of a figure in a part of the run: temporary growth with a guest does not count."""
        return min(row[name][what] for row in rows if first * num_steps <= row["step"] <= last * num_steps)

    for name, (what, (factor, noise)) in itertools.product(("monitor", "trainer"), LIMITS.items()):
        before, after = least(name, what, 0.2, 0.4), least(name, what, 0.8, 1.0)
        assert after <= max(before * factor, before + noise), f"{what} of the {name} grew from {before} to {after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("faults", "leaks"))
    parser.add_argument("--steps", type=int, required=True, help="global steps of each run")
    args = parser.parse_args()
    guard_children()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    prepare_data(folder)
    print(f"Logs in {folder}", flush=True)
    {"faults": inject_faults, "leaks": find_leaks}[args.kind](folder, args.steps)


if __name__ == "__main__":
    main()
