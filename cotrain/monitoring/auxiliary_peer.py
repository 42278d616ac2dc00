"""Auxiliary peer: lends its bandwidth to the trainers' rounds and contributes no gradients.

DeDLOC and CALM had such peers. A monitor with --assist_in_averaging runs one.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from cotrain.arguments import BaseTrainingArguments, OptimizerArguments
from cotrain.averaging.coordinator import Outcome, RoundCoordinator
from cotrain.averaging.progress import ProgressTracker
from cotrain.averaging.round_log import RoundLog, describe_round
from cotrain.averaging.rounds import RoundAverager
from cotrain.common.processes import StopSignal
from cotrain.common.threads import PeriodicThread
from cotrain.peer.addresses import announce_public_ip
from cotrain.peer.peer import start_peer, supervise
from cotrain.training.optimizer import build_auxiliary

logger = get_logger(__name__)


class AuxiliaryPeer(PeriodicThread):
    """Thread of an auxiliary peer: takes part in each round until `stop` is called."""

    def __init__(self, tracker: ProgressTracker, averager: RoundAverager, folder: Path, args: OptimizerArguments):
        super().__init__(period=0.1)  # seconds between two looks at whether a step is due
        self.tracker, self.averager = tracker, averager
        self.coordinator = RoundCoordinator(tracker, averager, args.matchmaking_time, args.averaging_timeout)
        self.round_log = RoundLog(folder)

    def run(self) -> None:
        self.tracker.start()
        super().run()

    def work(self) -> None:
        try:
            self.coordinator.look_ahead()
            is_needed = self.tracker.num_expected(self.tracker.next_step) > 0
            if self.coordinator.has_group or (is_needed and self.tracker.seconds_to_step <= 0):
                self._assist(self.tracker.next_step)
        except Exception as error:
            logger.warning(f"Could not assist in averaging ({error!r}); trying again at the next step")

    def _assist(self, step: int) -> None:
        self.tracker.begin_step(step, contributed=0)
        outcome, result = self.coordinator.average(step, weight=0.0)
        if outcome == Outcome.STOPPED:
            return
        self.round_log.write({"time": time.time(), "step": step, "outcome": outcome.value, **describe_round(result)})
        if outcome == Outcome.AVERAGED:
            logger.info(f"Assisted {len(result.members) - 1} peers in averaging step #{step}")
        self.tracker.complete_step(step, 0)

    def stop(self, seconds: float = 5.0) -> None:
        """End the thread. It may be in a round with trainers that have left."""
        super().stop()
        self.coordinator.stop()
        self.join(seconds)
        self.tracker.shutdown(1.0)


@contextlib.contextmanager
def open_auxiliary_peer(
    model: torch.nn.Module,
    peer_args: BaseTrainingArguments,
    args,
    run_args,
    maddrs: Iterable[Multiaddr],
    stop: StopSignal,
) -> Iterator[None]:
    """Run an auxiliary peer in a thread. Call it in the main thread.

    :param model: of the run; its values are not used
    :param peer_args: of the monitor
    :param args: TrainingMonitorArguments of run_training_monitor.py, and `run_args` its RunArguments
    :param maddrs: of the monitor, through which this peer joins
    """
    peer_args = dataclasses.replace(
        peer_args,
        initial_peers=[str(maddr) for maddr in maddrs],
        use_ipfs=False,
        host_maddrs=args.assistant_maddrs,
        announce_maddrs=[],
        identity_path=None,
        invitation=args.assistant_invitation,
        tunnel="none",
        announce_tunnel=None,
    )
    if args.use_google_dns:
        announce_public_ip(peer_args, args.public_ip_service)
    folder = Path(args.output_dir) / "assistant"  # the key of an invitation is written there
    with contextlib.ExitStack() as stack:
        peer = start_peer(peer_args, folder / "identity.key", client_mode=False, should_stop=stop.event)
        stack.callback(peer.dht.shutdown)
        tracker, averager = build_auxiliary(model, peer, peer_args.run_id, run_args)
        stack.callback(averager.shutdown)
        children = {"assistant's DHT": peer.dht, "assistant's averager": averager}
        stack.enter_context(supervise(children, seconds=12.0, exit_code=0))
        auxiliary_peer = AuxiliaryPeer(tracker, averager, folder, run_args)
        auxiliary_peer.start()
        stack.callback(auxiliary_peer.stop)
        maddrs = " ".join(str(maddr) for maddr in peer.dht.get_visible_maddrs())
        logger.info(f"Assisting in averaging; trainers must be able to reach {maddrs}")
        yield
