"""How a peer joins the run and catches up with it, and when it offers its own state."""

import threading

from hivemind.utils import get_logger

from peerstep.progress.tracker import ProgressTracker
from peerstep.progress.view import View
from peerstep.reports.marks import different_marks
from peerstep.reports.progress_report import PeerProgress
from peerstep.state.averager import TrainingStateAverager
from peerstep.state.membership import Membership
from peerstep.step.coordinator import Outcome, StepRecord
from peerstep.step.log import StepLog
from peerstep.step.shared_model import SharedModel

logger = get_logger(__name__)

MAX_MISSED_UPDATES = 64  # steps that the other peers can have taken during a download or a sleep
MAX_FAILED_LOADS = 3  # before peers that claim a step without any offered state are ignored for a while


def num_skippable(view: View, membership: Membership) -> int:
    """Return by how many steps the larger side is ahead in this peer's history; 0 if this peer needs its state."""
    other = view.side_to_join
    if other is None or different_marks(membership.marks, other.marks) != []:
        return 0
    missed = other.completed - membership.step
    return missed if missed <= MAX_MISSED_UPDATES else 0


def is_out_of_sync(view: View, membership: Membership) -> bool:
    """Whether the other trainers, the larger side, have another history, or are too far ahead."""
    return view.side_to_join is not None and num_skippable(view, membership) <= 0


class Joining:
    """Downloads the state of the run, passes over steps of the others, and reports where this peer is."""

    def __init__(
        self,
        state_averager: TrainingStateAverager,
        tracker: ProgressTracker,
        model: SharedModel,
        log: StepLog,
        stopped: threading.Event,
    ):
        self.state_averager, self.membership = state_averager, state_averager.membership
        self.tracker, self.model, self.log = tracker, model, log
        self._stopped, self._failed_loads = stopped, 0

    def report(self) -> None:
        """Report the step that this peer is at, the samples for the next one, and its standing."""
        samples = self.model.accumulator.num_samples
        self.tracker.report_position(self.membership.step, samples, **self.membership.report())

    def forget_progress(self) -> None:
        """Drop the accumulated gradients, which belong to previous parameters."""
        self.model.is_broken = False
        self.model.accumulator.drop()
        self.report()

    def share_state(self) -> None:
        """Offer this peer's state to joining peers, unless it lacks an update, or is paused and others train.

        Only updates that another trainer has count: if all lack the same ones, their states are all there is.
        """
        averager, view = self.state_averager, self.tracker.view()
        if view.num_lacking >= 1 or (self.membership.is_paused and view.present):
            averager.allow_state_sharing = False
        elif not averager.client_mode:
            averager.offer(priority=self.membership.applied)

    def skip(self, missed: int) -> None:
        """Continue at the step of the others, as after a sleep. They give this peer the updates that it lacks."""
        self.membership.slept(missed)
        self._announce_step()
        step = self.membership.step
        logger.info(f"Missed {missed} steps: receiving the parameters in the round of step #{step + 1}")

    def _announce_step(self) -> None:
        self.log.add(StepRecord(self.membership.step, Outcome.CAUGHT_UP))
        self.report()
        self.share_state()

    def load(self) -> bool:
        """Download the newest state that a peer offers and that fits; False without one. Holds the step lock."""
        with self.model.step_lock, self.tracker.pause_updates():
            other, query = self.tracker.view().side_to_join, {}
            if other is not None:
                # Offers lag by a step, but a state of this peer's own step is not what it lacks.
                least = max(0, other.completed - (other.completed != self.membership.step + 1))
                query = {"min_step": least, "credible_step": other.epoch, "marks": other.marks}
            self.tracker.set_away(True)
            with self.model.update_lock:
                loaded = self.state_averager.load_state_from_peers(**query)
            self.tracker.set_away(self.membership.is_away)
            if loaded:
                self._take_part()
            elif other is not None:
                return self._follow_clients(other) or self._ignore_unbacked_claim(other)
        return loaded

    def _take_part(self) -> None:
        """Go on with a downloaded state, in the current or next round of the others."""
        self.model.has_update, self.model.is_broken = True, False
        self.tracker.report_position(self.membership.step, 0, marks=self.membership.marks)
        self.tracker.hear_all()
        self.tracker.refresh()
        missed = max(0, self.tracker.view().agreed_step - self.membership.step)
        self.membership.loaded(missed if missed <= MAX_MISSED_UPDATES else 0)
        self.model.accumulator.drop()
        self._announce_step()
        self._failed_loads = 0

    def _follow_clients(self, other: PeerProgress) -> bool:
        """Join trainers that are all in client mode and thus offer no state; False if one is not.

        Only a newcomer does, which has nothing to lose by a lie. It receives their parameters in their rounds.
        """
        others = [other, *self.tracker.view().live]
        if self.membership.step > 0 or not all(progress.client_mode for progress in others):
            return False
        logger.warning(
            "All other trainers are in client mode, and nobody can download a state from them: joining without their "
            "optimizer statistics. Let one trainer have a public address"
        )
        self.membership.joined_without_state(other.completed)
        self.forget_progress()
        self.log.add(StepRecord(other.completed, Outcome.CAUGHT_UP))
        return True

    def _ignore_unbacked_claim(self, other: PeerProgress) -> bool:
        """Record a claim of a step without an offer, and ignore such claims after MAX_FAILED_LOADS. Return False.

        At once if this peer's side is larger: only at its beginning does a claim of fewer stop it.
        """
        self._failed_loads += 1
        view = self.tracker.view()
        claims = [progress for progress in view.live if abs(progress.epoch - other.epoch) <= 1]
        if self._failed_loads < MAX_FAILED_LOADS and len(claims) > len(view.side):
            self._stopped.wait(1.0)
            self.tracker.refresh()
            return False
        self._failed_loads = 0
        number = self.tracker.ignore(claims)
        logger.warning(f"Ignoring the peers that claim step #{other.epoch} ({number}): nobody offers a state of it")
        return False
