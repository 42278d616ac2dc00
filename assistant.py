"""An auxiliary peer: it lends its bandwidth to the trainers' averaging and contributes no gradients.

DeDLOC and CALM had such peers. A monitor runs one with --assist_in_averaging.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from hivemind.utils import get_logger

from arguments import (
    AveragerArguments,
    BaseTrainingArguments,
    HyperparameterArguments,
    OptimizerArguments,
    ProgressTrackerArguments,
    TrainingMonitorArguments,
)
from collaboration import watched
from hivemind_fixes import Optimizer
from optimizer import build_optimizer
from processes import StopSignal
from shunned import ShunnedPeers
from utils import Peer, announce_public_ip, start_peer

logger = get_logger(__name__)


class Assistant(threading.Thread):
    """Takes part in each round of averaging, until `stop` is called.

    :param folder: where it keeps what it found out about other peers
    :param period: seconds between two looks at the trainers' progress
    """

    def __init__(self, optimizer: Optimizer, folder: Path, period: float = 0.5):
        super().__init__(name="Assistant", daemon=True)
        self.optimizer, self.period = optimizer, period
        self.shunned = ShunnedPeers(folder, optimizer)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self.period):
            try:
                self._skip_missed_steps()
                self.optimizer.step()
                self.shunned.save()
            except Exception as error:
                logger.warning(f"Could not assist in averaging ({error!r}); trying again at the next step")

    def _skip_missed_steps(self) -> None:
        """hivemind's auxiliary peers load no state: one that comes late would try each step from the first."""
        tracker = self.optimizer.tracker
        if tracker.global_epoch > self.optimizer.local_epoch + 1:
            with tracker.pause_updates():
                self.optimizer.state_averager.local_epoch = tracker.global_epoch
                tracker.update_epoch(tracker.global_epoch)

    def stop(self, seconds: float = 5.0) -> None:
        """End the thread, which may be in a round with trainers that have gone, before the optimizer is shut down."""
        self._stopped.set()
        deadline = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < deadline:
            self.optimizer.break_off_rounds()
            self.join(0.2)


@contextlib.contextmanager
def running_assistant(
    model: torch.nn.Module,
    monitor: Peer,
    monitor_args: TrainingMonitorArguments,
    peer_args: BaseTrainingArguments,
    hyperparameters: HyperparameterArguments,
    optimizer_args: OptimizerArguments,
    averager_args: AveragerArguments,
    tracker_args: ProgressTrackerArguments,
    stop: StopSignal,
) -> Iterator[None]:
    """Let an assistant work beside a monitor. Call it in the main thread.

    It is a peer of its own, with its own port: the monitor's answers for checkpoints under the same name.

    :param model: of the run; its values are not used
    """
    args = dataclasses.replace(
        peer_args,
        initial_peers=[str(maddr) for maddr in monitor.dht.get_visible_maddrs()],
        use_ipfs=False,
        host_maddrs=monitor_args.assistant_maddrs,
        announce_maddrs=[],
        identity_path=None,
        invitation=monitor_args.assistant_invitation,
        tunnel="none",
        announce_tunnel=None,
    )
    if monitor_args.use_google_dns:
        announce_public_ip(args, monitor_args.public_ip_service)
    with contextlib.ExitStack() as stack:
        # In a folder of its own: an invitation's key goes beside it, and the monitor has one, too.
        folder = Path(monitor_args.output_dir) / "assistant"
        peer = start_peer(args, folder / "identity.key", client_mode=False, should_stop=stop.event)
        stack.callback(peer.dht.shutdown)
        optimizer = build_optimizer(
            model, peer, args.run_id, None, 0.0, hyperparameters, optimizer_args, averager_args, tracker_args
        )
        stack.callback(optimizer.shutdown)
        children = {
            "assistant's DHT": peer.dht,
            "assistant's state averager": optimizer.state_averager,
            "assistant's gradient averager": optimizer.grad_averager,
        }
        stack.enter_context(watched(children, seconds=12.0, exit_code=0))
        assistant = Assistant(optimizer, folder)
        assistant.start()
        stack.callback(assistant.stop)
        maddrs = " ".join(str(maddr) for maddr in peer.dht.get_visible_maddrs())
        logger.info(f"Assisting in averaging; trainers must be able to reach {maddrs}")
        yield
