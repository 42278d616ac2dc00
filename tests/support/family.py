"""The processes of a script: its main process and all descendants."""

import contextlib

import psutil


class Family:
    """A process and its descendants, including those whose parent has ended after `look` has seen them.

    `look` asks for the parent of each process only once. psutil's `children` asks for the parents of all processes in
    each call, which took up to 7 % of a core in every test that waited for a script.

    :param pid: ID of the main process
    """

    def __init__(self, pid: int):
        self._members: dict[int, psutil.Process] = {}
        self._strangers: set[int] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._members[pid] = psutil.Process(pid)

    def look(self) -> None:
        """Note the processes that have been started since the last call."""
        pids = set(psutil.pids())
        self._strangers &= pids
        self._members = {pid: process for pid, process in self._members.items() if pid in pids}
        parents = {}
        for pid in pids - self._strangers - self._members.keys():
            with contextlib.suppress(psutil.NoSuchProcess):
                parents[pid] = psutil.Process(pid).ppid()
        while found := [pid for pid, parent in parents.items() if parent in self._members]:
            for pid in found:
                del parents[pid]
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._members[pid] = psutil.Process(pid)
        # The parent of a process may have started during `pids`, without being in it: the next call sees both.
        self._strangers.update(pid for pid, parent in parents.items() if parent in pids or parent == 0)

    def alive(self) -> list[psutil.Process]:
        """Return the live processes, the main process first."""
        self.look()
        return [process for process in self._members.values() if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
