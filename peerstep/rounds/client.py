"""The trainer's side of rounds, which run in the averager's process."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from hivemind.utils import MPFuture

from peerstep.peer.clock import run_time
from peerstep.rounds.averager import RoundAverager
from peerstep.rounds.claims import Claims
from peerstep.rounds.matchmaking import RosterEntry, RoundControl
from peerstep.rounds.result import RoundResult


class RoundClient:
    """Asks the averager's process for rounds.

    Fill the averager's `gradients` before a round. Its result has the averages, in the same memory.
    """

    def __init__(self, averager: RoundAverager):
        self.averager = averager
        self._lock_pipe = threading.Lock()

    @property
    def requested_step(self) -> int:
        """Step for which another peer asks this one for a group; -1 if none does."""
        return self.averager.requested_step.value

    def schedule(self, step: int, timeout: float, **standing) -> RoundControl:
        """Start the search for the group of a step. It ends after `timeout` seconds, unless the all-reduce is running.

        :param standing: of this peer's parameters: fields of Claims
        :returns: the handle of the round; set its weight and call `allow_allreduce` once the contribution is loaded
        """
        bandwidth = 0.0 if self.averager.client_mode else self.averager.claim.value
        control = RoundControl(
            scheduled_time=run_time(),
            deadline=run_time() + timeout,
            allow_retries=False,
            weight=0.0,
            data_for_gather=Claims(bandwidth, **standing).pack(),
        )
        control.step, attached = step, MPFuture()
        self._send("_step", control=control, step=step, future_for_init=attached)
        control.attach(*attached.result(timeout=30.0))
        return control

    def collect(self, control: RoundControl) -> RoundResult:
        """Return the result of a round that has ended, with the averages. Raises what the round has raised."""
        result, averager = control.result(timeout=0), self.averager
        parameters = None if result.received_parameters is None else averager.averaged_parameters
        return replace(result, gradients=averager.gradients, parameters=parameters)

    def set_roster(self, entries: Sequence[RosterEntry], finished_step: int) -> None:
        """Set the roster of the next round, and the newest finished step."""
        self._send("_set_roster", entries=entries, finished_step=finished_step)

    def _send(self, method: str, **kwargs) -> None:
        with self._lock_pipe:
            self.averager._outer_pipe.send((method, [], kwargs))
