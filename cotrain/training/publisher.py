"""What a trainer tells the user, the monitor and its log about each global step."""

import itertools
import random
from collections import deque

from hivemind.utils import MPFuture, get_logger

from cotrain.common.json_file import JsonLinesFile
from cotrain.common.names import short
from cotrain.dht.metrics_schema import StepMetrics, history_length
from cotrain.dht.run_records import MAX_MEMBERS, TrainerRecord
from cotrain.peer.relay import RunConfigRelay
from cotrain.status.status_keeper import StatusKeeper
from cotrain.training.own_loss import OwnLoss
from peerstep.local_peer import LocalPeer
from peerstep.reports.records import store_record
from peerstep.step.coordinator import StepRecord

logger = get_logger(__name__)

NAMED_ROUNDS = 16  # whose members a peer names in its record


class Publisher:
    """Publishes this peer's record, which has its metrics of the newest global steps and who was in its rounds."""

    def __init__(self, name: str, peer: LocalPeer, relay: RunConfigRelay, status: StatusKeeper):
        self.name, self.peer, self.relay, self.status = name, peer, relay, status
        self.args, self.optimizer = status.args, status.optimizer
        self.history: deque[StepMetrics] = deque(maxlen=history_length())  # for monitors that missed steps
        self._rounds = JsonLinesFile(status.folder / "rounds.jsonl", max_bytes=16 * 2**20)
        self._members: deque[list[str]] = deque(maxlen=NAMED_ROUNDS)
        self.own_loss: OwnLoss | None = None  # with --own_data
        self.optimizer.on_round = self._record_round

    def _record_round(self, entry: dict) -> None:
        """Log a round, and keep who gave samples in it; of a peer that reduced nothing, the whole group."""
        names = [name for name, samples in entry["weights"].items() if samples >= 1] or entry["group"]
        self._members.append(random.sample(names, len(names)))
        self._rounds.write(entry)

    def measure_own_loss(self) -> None:
        if self.own_loss is not None and self.own_loss.measure():
            self.status.record_own_loss(self.own_loss.base, self.own_loss.newest)

    def report(self, record: StepRecord) -> StepMetrics:
        """Log a global step and publish this peer's metrics for it, which are returned.

        If two global steps complete within one local step, the first one has all of the loss.
        """
        loss, mini_steps = self.status.loss_meter.pop()
        samples_per_second = self.status.speed = float(self.optimizer.local_progress.samples_per_second)
        logger.info(f"Step #{record.step}")
        logger.info(f"Your current contribution: {self.status.applied} samples")
        logger.info(f"Performance: {samples_per_second:.3f} samples/sec")
        if mini_steps:
            logger.info(f"Local loss: {loss / mini_steps:.5f}")
            self.status.record_loss(loss / mini_steps)
        values = {"samples_accumulated": record.samples, "loss": loss, "mini_steps": mini_steps}
        values |= {"step": record.step, "samples_per_second": samples_per_second, "time": record.time}
        self.history.append(StepMetrics(**values))
        self.measure_own_loss()
        self.publish()
        return self.history[-1]

    def publish(self, leaving: bool = False) -> MPFuture:
        """Publish this peer's record, and the settings of the run. Does not wait for the result.

        :param leaving: whether this peer waits for a monitor to save the last step
        """
        pace, (computed, applied) = self.optimizer.pace, self.status.recent_samples()
        own = self.own_loss
        members = dict.fromkeys(map(short, itertools.chain(*reversed(self._members.copy()))))
        record = TrainerRecord(
            username=self.name,
            leaving=leaving,
            history=[entry.to_row() for entry in self.history],
            rounds=len(pace.recent_rounds),
            complete=sum(pace.recent_rounds),
            computed=computed,
            applied=applied,
            averaging=pace.averaging_share,
            members=list(members)[:MAX_MEMBERS],
            paused=bool(self.status.paused),
            **({} if own is None else {"own_base_loss": own.base, "own_loss": own.newest}),
        )
        self.relay.publish()
        key, lifetime = f"{self.args.run_id}_trainers", self.args.statistics_expiration
        return store_record(self.peer.dht, key, self.peer.public_key, record.dict(), lifetime)
