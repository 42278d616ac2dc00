#!/usr/bin/env python3
"""How many rounds of averaging are complete, and how long do they take? hivemind's averager, and ours:

benchmarks/rounds.py --rounds 1000

Two peers on this machine average a vector, each as soon as it has found that the round is due, up to --skew seconds
after the other. A round is complete if both have the whole average in the end. Something that takes the processor
beside it makes the difference plainer.
"""

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from hivemind.averaging import DecentralizedAverager

sys.path.insert(0, str(Path(__file__).parent.parent))

from hivemind_fixes import SafeAverager, SafeDHT

LOCAL = ["/ip4/127.0.0.1/tcp/0"]
TIMEOUT = 10.0  # of a round, in seconds


def average(averagers: Sequence[DecentralizedAverager], skew: float) -> bool:
    """One round, of zeros and ones; whether both have halves in the end."""
    for value, averager in enumerate(averagers):
        with averager.get_tensors() as tensors:
            for tensor in tensors:
                tensor.fill_(value)
    controls = [averager.step(wait=False, require_trigger=True, timeout=TIMEOUT) for averager in averagers]
    for control in random.sample(controls, 2):
        control.allow_allreduce()
        time.sleep(random.uniform(0, skew))
    for control in controls:
        with contextlib.suppress(Exception):  # no group was found, say
            control.result(2 * TIMEOUT)
    halves = []
    for averager in averagers:
        with averager.get_tensors() as tensors:
            halves += [bool((tensor == 0.5).all()) for tensor in tensors]
    return all(halves)


def measure(averager_class: type[DecentralizedAverager], rounds: int, size: int, skew: float) -> tuple[int, float]:
    """The number of complete rounds, and the seconds of all."""
    with contextlib.ExitStack() as stack:
        first = SafeDHT(start=True, host_maddrs=LOCAL)
        stack.callback(first.shutdown)
        second = SafeDHT(start=True, host_maddrs=LOCAL, initial_peers=first.get_visible_maddrs())
        stack.callback(second.shutdown)
        averagers = []
        for dht in (first, second):
            averager = averager_class(
                [torch.zeros(size)], dht, prefix="rounds", target_group_size=2, min_matchmaking_time=3.0,
                next_chunk_timeout=TIMEOUT / 2, start=True,
            )  # fmt: skip
            stack.callback(averager.shutdown)
            averagers.append(averager)
        average(averagers, skew)  # the first finds out addresses
        started = time.perf_counter()
        complete = sum(average(averagers, skew) for _ in range(rounds))
        return complete, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--size", type=int, default=20_000, help="Numbers that are averaged in each")
    parser.add_argument("--skew", type=float, default=0.2, help="Seconds between the two peers, at most")
    args = parser.parse_args()

    print(f"{'':<12}{'rounds':>8}{'incomplete':>12}{'ms a round':>12}")
    seconds = []
    for name, averager_class in (("hivemind's", DecentralizedAverager), ("ours", SafeAverager)):
        complete, duration = measure(averager_class, args.rounds, args.size, args.skew)
        print(
            f"{name:<12}{args.rounds:>8}{args.rounds - complete:>12}{1000 * duration / args.rounds:>12.0f}", flush=True
        )
        seconds.append(duration)
    print(f"time, ours to hivemind's: {seconds[1] / seconds[0]:.2f}")


if __name__ == "__main__":
    main()
