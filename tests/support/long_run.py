#!/usr/bin/env python3
"""Leak check: memory, threads, file descriptors and processes of a monitor and a trainer over a long run.

Another trainer, the guest, joins and leaves every few steps.

    python tests/support/long_run.py --steps 500

The script prints a table, and exits with 1 if a figure grew after the warm-up. `make soak` runs it.
"""

import argparse
import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from lib.common.processes import guard_children
from tests.support.peers import Script, Scripts, prepare_data, steps_of

PACE = 0.05  # seconds for a micro-batch; a global step takes less than a second
# Largest growth allowed from the warm-up to the end: a factor, and an absolute amount that counts as noise
LIMITS = {"memory MB": (1.2, 60.0), "threads": (1.1, 6), "file descriptors": (1.1, 12), "processes": (1.0, 1)}


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


def least(rows: list, name: str, first_step: float, last_step: float) -> dict[str, float]:
    """Return the minimum of each figure in a range of steps, so that temporary growth with a guest does not count."""
    values = [peers[name] for step, peers in rows if first_step <= step <= last_step]
    return {what: min(value[what] for value in values) for what in LIMITS}


def newest_step(script: Script) -> int:
    return max((int(step) for step in re.findall(r"\bStep #(\d+)", script.output)), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="global steps")
    parser.add_argument("--every", type=int, default=10, help="steps between two arrivals of the other trainer")
    parser.add_argument(
        "--warm_up", type=float, default=0.2, help="fraction of the steps after which nothing may grow"
    )
    parser.add_argument("--seconds", type=float, default=3000.0, help="give up after this time")
    args = parser.parse_args()
    guard_children()
    folder = Path(tempfile.mkdtemp(prefix="long-run-"))
    prepare_data(folder)
    print(f"Logs in {folder}", flush=True)
    scripts = Scripts(folder, folder)
    try:
        sys.exit(watch(scripts, args))
    finally:
        scripts.close()


def watch(scripts: Scripts, args: argparse.Namespace) -> int:
    monitor = scripts.monitor("--save_checkpoint_step_interval", 5)
    steps = steps_of(seconds=0.8, num_trainers=1, pace=PACE)
    common = ("--initial_peers", monitor.address, *steps, "--averaging_timeout", 10, "--metadata_expiration", 20,
              "--backup_every_steps", 5, "--save_steps", 200)  # fmt: skip
    trainer = scripts.trainer("stays", *common, pace=PACE)
    watched = {"monitor": monitor, "trainer": trainer}
    deadline, rows, guest, num_guests = time.monotonic() + args.seconds, [], None, 0
    print(f"{'step':>5} {'peer':>8} " + " ".join(f"{name:>16}" for name in LIMITS), flush=True)
    while (step := newest_step(trainer)) < args.steps:
        assert time.monotonic() < deadline, f"only step {step} after {args.seconds} seconds"
        assert all(script.process.poll() is None for script in watched.values()), "a peer has ended"
        if guest is None or guest.process.poll() is not None:
            num_guests += 1
            guest = scripts.trainer(
                "guest", *common, "--max_global_steps", step + args.every, "--leave_timeout", 0, pace=PACE
            )
        if not rows or step >= rows[-1][0] + args.steps // 20:
            rows.append((step, {name: measure(script) for name, script in watched.items()}))
            for name, values in rows[-1][1].items():
                print(f"{step:>5} {name:>8} " + " ".join(f"{value:>16.0f}" for value in values.values()), flush=True)
        time.sleep(0.5)
    problems = []
    for name in watched:
        before = least(rows, name, args.steps * args.warm_up, args.steps * 2 * args.warm_up)
        at_the_end = least(rows, name, args.steps * (1 - args.warm_up), args.steps)
        problems += [
            f"{what} of the {name} grew from {before[what]:.0f} to {at_the_end[what]:.0f}"
            for what, (factor, noise) in LIMITS.items()
            if at_the_end[what] > max(before[what] * factor, before[what] + noise)
        ]
    print(f"{newest_step(trainer)} steps, {num_guests} guests")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    main()
