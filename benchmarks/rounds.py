#!/usr/bin/env python3
"""Measure how many samples are applied in global steps when trainers are slow, freeze or join.

benchmarks/rounds.py

All peers run on this machine, with a tiny model whose micro-batches sleep: a monitor, a fast trainer, one whose local
step takes 20 s, one in client mode, one that is frozen for 20 s (SIGSTOP of all its processes) after a quarter of the
time, and one that joins after two fifths of the time and whose download takes three global steps. Needs no network.
"""

import argparse
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.round_records import OUTCOMES, RunSummary, percentile, ratio, summarize
from benchmarks.swarm import BATCH_SIZE, Swarm, open_folder, print_incomplete

PACE = 0.5  # seconds of a micro-batch
SLOW_PACE, SLOW_BATCH_SIZE = 20.0, 4 * BATCH_SIZE
FROZEN_SECONDS = 20.0
DOWNLOAD_SECONDS = 36.0
STEP_SECONDS = 13.0  # with all trainers but the newcomer
GRACE_SECONDS = 12.0  # for the rounds in progress at the end

LEGEND = """\
computed    samples of the local steps between the first and the last global step
applied     samples that went into an average with others, in the steps after the first
rounds      how they ended at the trainer; absent: alive when the step was due, but no round of it
waited      seconds inside of the optimizer's step(), in which the trainer computes nothing
complete    steps for which all trainers that were alive when it was due (not frozen, not downloading) were in one
            group
due         when the first trainer began the step
averaged    when a trainer had the average of gradients and parameters"""


def play(swarm: Swarm, seconds: float) -> RunSummary:
    """Run for some seconds after all initial trainers have begun; the newcomer joins later."""
    try:
        swarm.start_monitor("--refresh_period", 1)
        swarm.start_trainer("fast", PACE)
        swarm.start_trainer("slow", SLOW_PACE, "--per_device_train_batch_size", SLOW_BATCH_SIZE)
        swarm.start_trainer("client", PACE, "--client_mode")
        swarm.start_trainer("frozen", PACE)
        swarm.wait_until_all_train()
        began, since = time.time(), time.monotonic()
        time.sleep(seconds / 4)
        swarm.freeze("frozen", FROZEN_SECONDS)
        time.sleep(max(0.0, since + seconds * 2 / 5 - time.monotonic()))
        swarm.start_trainer("newcomer", PACE, download_seconds=DOWNLOAD_SECONDS)
        time.sleep(max(0.0, since + seconds - time.monotonic()))
        swarm.assert_alive()
        ended = time.time()
        time.sleep(GRACE_SECONDS)
    finally:
        swarm.stop()
    return summarize(swarm.read_records(), began, ended)


def print_summary(summary: RunSummary) -> None:
    print(f"{len(summary.steps)} global steps in {summary.seconds:.0f} s")
    names = (*OUTCOMES, "absent")
    print(f"  {'trainer':<10}{'computed':>9}{'applied':>9}{'fraction':>10}", end="")
    print("".join(f"{name:>9}" for name in names), f"{'waited':>8}{'downloads':>11}")
    for peer in summary.peers:
        print(
            f"  {peer.name:<10}{peer.computed:>9}{peer.applied:>9}{ratio(peer.applied, peer.computed):>10.0%}", end=""
        )
        print("".join(f"{peer.outcomes[name]:>9}" for name in names), end=" ")
        print(f"{peer.seconds_waited:>6.1f} s{peer.seconds_downloading:>9.1f} s")
    print_incomplete(summary)
    applied = sum(peer.applied for peer in summary.peers)
    print(f"""
samples applied / computed       {summary.applied_fraction():>8.3f}
samples applied per second       {ratio(applied, summary.seconds):>8.1f}
global step, p50, p95 (s)        {percentile(summary.durations, 50):>8.1f}{percentile(summary.durations, 95):>8.1f}
complete rounds                  {summary.complete_fraction:>8.3f}
complete and received in full    {summary.whole_fraction:>8.3f}
due to averaged, p50, p95 (s)    {percentile(summary.latencies, 50):>8.1f}{percentile(summary.latencies, 95):>8.1f}
seconds waited, all trainers     {sum(peer.seconds_waited for peer in summary.peers):>8.1f}

{LEGEND}
load average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores""")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="after all trainers have begun")
    parser.add_argument("--folder", type=Path, help="keep the logs in this folder")
    args = parser.parse_args()
    rate = 3 * BATCH_SIZE / PACE + SLOW_BATCH_SIZE / SLOW_PACE  # samples per second, without the newcomer
    with ExitStack() as stack:
        folder, data, launcher = open_folder(stack, args.folder, "rounds")
        flags = ("--matchmaking_time", 5, "--averaging_timeout", 30, "--max_refresh_period", 2)
        print_summary(
            play(Swarm(folder / "run", data, launcher, round(STEP_SECONDS * rate), *flags), 60 * args.minutes)
        )


if __name__ == "__main__":
    main()
