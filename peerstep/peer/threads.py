"""Thread for background work at regular intervals."""

import threading


class PeriodicThread(threading.Thread):
    """Thread that calls `work` every `period` seconds until `stop` is called. A daemon: it does not block exit.

    :param period: seconds between the end of one call and the start of the next; `work` may change it
    """

    def __init__(self, period: float):
        super().__init__(name=type(self).__name__, daemon=True)
        self.period = period
        self.stopped = threading.Event()

    def work(self) -> None:
        """Do the work of one period. An exception ends the thread."""
        raise NotImplementedError

    def run(self) -> None:
        while not self.stopped.wait(self.period):
            self.work()

    def stop(self) -> None:
        """Start no further call of `work`. A running call continues; `join` waits for it."""
        self.stopped.set()
