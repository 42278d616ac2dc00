#!/usr/bin/env python3
"""A long run that must not grow: memory, threads, file descriptors and processes of a monitor and a trainer.

    python tests/support/soak.py --steps 500

Another trainer joins and leaves every few steps. It fails if one of the figures grew after the first fifth of the run.
"""

import argparse
import contextlib
import itertools
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from peerstep.peer.processes import guard_children
from tests.support.peers import Script, Scripts, prepare_data, read_jsonl, steps_of

MAX_SECONDS = 3000  # after which the run is given up
PACE = 0.05  # seconds for a micro-batch; a global step takes less than a second
# Largest growth allowed from the warm-up to the end: a factor, and an absolute amount that counts as noise
LIMITS = {"memory MB": (1.2, 60.0), "threads": (1.1, 6), "file descriptors": (1.1, 12), "processes": (1.0, 1)}


def measure(script: Script) -> dict[str, int]:
    """Measure a script and all its processes.

    Memory is anonymous and shared memory, with each page counted once. Pages of files are excluded: their share
    depends on the other processes that have them open.
    """
    total = dict.fromkeys(LIMITS, 0)
    for process in script.family():
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
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
    parser.add_argument("--steps", type=int, required=True, help="global steps")
    args = parser.parse_args()
    guard_children()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    prepare_data(folder)
    print(f"Logs in {folder}", flush=True)
    find_leaks(folder, args.steps)


if __name__ == "__main__":
    main()
