"""CPU time and memory of the processes of a peer, by part. Reads /proc only."""

import contextlib
from collections import Counter
from collections.abc import Sequence

import psutil

PARTS = ("main", "DHT", "state averager", "round averager", "p2pd", "workers")


def name_parts(main: int, family: Sequence[psutil.Process]) -> dict[int, str]:
    """Map each process of a peer to its part. The averagers are forked after the DHT, the state averager first.

    Workers are the processes that load data, and what else the main process starts later.

    :param main: process ID of the main process
    """
    daemons = [process for process in family if process.name().startswith("p2pd")]
    parts = {process.pid: "p2pd" for process in daemons}
    parts.update({process.ppid(): "DHT" for process in daemons})
    parts[main] = "main"
    averagers = sorted(process.pid for process in family if process.pid not in parts and process.ppid() == main)
    parts.update(dict(zip(averagers, ("state averager", "round averager"), strict=False)))
    return {process.pid: parts.get(process.pid, "workers") for process in family}


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds that a process has used so far."""
    times = process.cpu_times()
    return times.user + times.system


def measure_cpu(main: int, family: Sequence[psutil.Process]) -> Counter:
    """Return the CPU seconds that the processes of a peer have used so far, by part."""
    cpu, parts = Counter(), name_parts(main, family)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            cpu[parts[process.pid]] += cpu_seconds(process)
    return cpu


def measure_memory(main: int, family: Sequence[psutil.Process], kind: str = "pss") -> Counter:
    """Return the bytes of memory of the processes of a peer, by part.

    :param kind: "pss", shared pages divided by their users; "uss", pages of this process alone
    """
    memory, parts = Counter(), name_parts(main, family)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            memory[parts[process.pid]] += getattr(process.memory_full_info(), kind)
    return memory
