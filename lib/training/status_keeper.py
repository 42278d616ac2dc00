"""Computes the status of a trainer now and then, and writes it to its output folder."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from hivemind.utils import get_logger

from lib.averaging.optimizer import CollaborativeOptimizer
from lib.common.json_file import JsonFile
from lib.common.threads import PeriodicThread
from lib.peer.connections import Connections, ConnectionWatcher
from lib.training.console import StatusPanel
from lib.training.contribution import LossHistory, RoundTally
from lib.training.loss_meter import LossMeter
from lib.training.status import (
    FILE_NAME,
    MAX_NAMED,
    MAX_SECONDS_TO_STEP,
    WRITE_SECONDS,
    TrainerStatus,
    describe_part,
    describe_progress,
    to_json,
)

logger = get_logger(__name__)

DRAW_SECONDS = 1.0  # between two updates of the panel
LOG_SECONDS = 30.0  # between two lines about the progress, without a panel


class StatusKeeper(PeriodicThread):
    """Thread that writes the status. The training thread only counts; neither of them reads the DHT.

    :param folder: the output folder
    :param name: the peer's name
    :param peer_id: in base58
    :param longest_wait: seconds without a local step after which the trainer hangs
    :param panel: shows the status, if there is a terminal
    :param should_stop: returns whether the trainer is to end. The panel is closed then: it would hide the messages
    :param connections: runs while this thread does
    :param loss_meter: has the losses since the previous global step
    :param page: address of the run's curves
    """

    def __init__(
        self,
        folder: Path,
        optimizer: CollaborativeOptimizer,
        run_id: str,
        name: str,
        peer_id: str,
        longest_wait: float,
        panel: StatusPanel | None = None,
        should_stop: Callable[[], bool] = bool,
        connections: ConnectionWatcher | None = None,
        loss_meter: LossMeter | None = None,
        page: str | None = None,
    ):
        super().__init__(WRITE_SECONDS if panel is None else DRAW_SECONDS)
        self.panel, self.should_stop, self.connections, self.page = panel, should_stop, connections, page
        self.optimizer, self.run_id, self.name_of_peer, self.longest_wait = optimizer, run_id, name, longest_wait
        self.loss_meter = loss_meter or LossMeter()
        self.tally = RoundTally(peer_id, optimizer.target_batch_size)
        self.losses = LossHistory()
        self._file = JsonFile(folder / FILE_NAME)
        self._process_started_at = psutil.Process().create_time()
        self._started_at, self._worked_at = time.time(), None
        self._computed = 0
        self._write_at = 0.0  # time.monotonic
        self._log_at = float("inf")  # the same

    def start(self) -> None:
        self._log_at = time.monotonic() + LOG_SECONDS
        self.work()  # the status of an earlier trainer in this folder is over
        if self.connections is not None:
            self.connections.start()
        super().start()

    def note_local_step(self) -> bool:
        """Count a local step unless its gradient was dropped or GradScaler skipped it; return whether it counts."""
        counts = self.optimizer.num_computed != self._computed
        if counts:
            self._computed, self._worked_at = self.optimizer.num_computed, time.time()
        return counts

    def note_loss(self, loss: float, number: int) -> None:
        """Note the sum of the losses of a number of micro-batches."""
        self.losses.add(loss, number, time.monotonic())

    def work(self) -> None:
        status = self.compute()
        if self.panel is not None:
            self._draw(status)
        elif time.monotonic() >= self._log_at and not self.should_stop():
            self._log_at = time.monotonic() + LOG_SECONDS
            logger.info(describe_progress(status, self.loss_meter.mean()))
        if time.monotonic() >= self._write_at:
            self._write_at = time.monotonic() + WRITE_SECONDS
            self.write(status)

    def _draw(self, status: TrainerStatus) -> None:
        if self.should_stop():
            self.panel.close()
            self.panel = None
            logger.info("Stopping. A second Ctrl-C ends the trainer at once")
            return
        try:
            self.panel.show(status)
        except OSError:  # the terminal is gone
            self.panel = None

    def write(self, status: TrainerStatus) -> None:
        self._file.save(to_json(status))

    def compute(self, has_ended: bool = False) -> TrainerStatus:
        """Return the current status. It takes some ten microseconds for each peer of the run."""
        tracker, tally, now = self.optimizer.tracker, self.tally, time.time()
        own, others = tracker.local_progress, tracker.alive(tracker.other_trainers)
        in_round = own.contributed if own.epoch > own.completed else 0
        rate, seconds = own.samples_per_second, tracker.seconds_to_step
        earlier_loss, earlier_seconds = self.losses.earlier(time.monotonic())
        connections = self.connections and self.connections.newest
        return TrainerStatus(
            time=now,
            pid=os.getpid(),
            process_started_at=self._process_started_at,
            run_id=self.run_id,
            page=self.page,
            name=self.name_of_peer,
            started_at=self._started_at,
            worked_at=self._worked_at,
            longest_wait=self.longest_wait,
            ended_at=now if has_ended else None,
            step=own.completed,
            next_step=own.epoch + 1,
            seconds_to_next=seconds if math.isfinite(seconds) and seconds < MAX_SECONDS_TO_STEP else None,
            own_samples=own.samples_accumulated,
            all_samples=tracker.global_progress.samples_accumulated,
            target_batch_size=self.optimizer.target_batch_size,
            computed=max(0, self._computed - own.samples_accumulated - in_round),
            applied=tally.applied,
            joined=tally.joined,
            missed=tally.missed,
            last_miss=tally.last_miss,
            num_trainers=1 + len(others),
            rank=1 + sum(peer.samples_per_second > rate for peer in others) if rate else None,
            samples_per_second=rate,
            loss=self.losses.newest(),
            earlier_loss=earlier_loss,
            earlier_seconds=earlier_seconds,
            **({} if connections is None else _summarize(connections)),
        )

    def pop_line(self) -> str | None:
        """Return one line about the newest global step; None if it was returned before."""
        if not self.tally.has_news:
            return None
        self.tally.has_news = False
        return describe_part(self.compute(), self.tally.step, self.tally.fraction)

    def close(self) -> None:
        """End the thread and note in the file that the trainer has ended."""
        self.stop()
        if self.connections is not None:
            self.connections.stop()
        if self.ident is not None:
            self.join()
            if self.panel is not None:
                self.panel.close()
            self.write(self.compute(has_ended=True))


def _summarize(connections: Connections) -> dict[str, object]:
    """Return the fields of the status about connections. Relayed peers, which are few, are named first."""
    relayed = connections.relayed[:MAX_NAMED]
    return {
        "num_direct": len(connections.direct),
        "num_relayed": len(connections.relayed),
        "direct": connections.direct[: MAX_NAMED - len(relayed)],
        "relayed": relayed,
    }
