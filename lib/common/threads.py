"""Background work at regular intervals."""

import threading


class PeriodicThread(threading.Thread):
    """Calls `work` every `period` seconds until it is stopped. A daemon: it does not keep the process alive.

    :param period: seconds between the end of one call and the next; `work` may change it
    """

    def __init__(self, period: float):
        super().__init__(name=type(self).__name__, daemon=True)
        self.period = period
        self.stopped = threading.Event()

    def work(self) -> None:
        """One turn. An exception ends the thread."""
        raise NotImplementedError

    def run(self) -> None:
        while not self.stopped.wait(self.period):
            self.work()

    def stop(self) -> None:
        """Begin no further turn. One that is under way continues; `join` waits for it."""
        self.stopped.set()
