"""The collaborative optimizer: hivemind.Optimizer with one averaging round per global step.

The main thread accumulates gradients. A second thread, the step thread, watches the progress of all peers. When a
global step is due, it takes the accumulated gradients, averages them with the other peers, and runs the optimizer on
the offloaded parameters. The main thread copies these to the model at its next local step. A peer with long local
steps therefore takes part in each round, with the gradients that it has.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import hivemind
import torch
from hivemind.utils import get_logger

from peerstep.local_peer import LocalPeer
from peerstep.options import Options
from peerstep.peer.processes import keep_free_memory, return_free_memory
from peerstep.progress.tracker import ProgressTracker
from peerstep.rounds.averager import RoundAverager
from peerstep.rounds.client import RoundClient
from peerstep.state.averager import TrainingStateAverager
from peerstep.state.layout import all_finite
from peerstep.state.membership import Membership, shared
from peerstep.state.statistics import OptimizerBuilder, SchedulerBuilder, constant_schedule
from peerstep.step.accumulators import GradientAccumulator, clip_norm
from peerstep.step.coordinator import RoundCoordinator, StepRecord
from peerstep.step.joining import Joining
from peerstep.step.local_updates import LocalTraining, LocalUpdates, step_builders
from peerstep.step.log import StepLog
from peerstep.step.shared_model import SharedModel
from peerstep.step.thread import StepThread
from peerstep.tensors.compression import COMPRESSIONS, build_state_compression

logger = get_logger(__name__)


class _Interface(hivemind.Optimizer):
    """What hivemind.Optimizer and torch.optim.Optimizer offer, without their `__init__`."""

    accumulator = shared("model.accumulator")

    @property
    def param_groups(self) -> list[dict]:
        """Groups of the model's parameters, with local updates those of the inner optimizer."""
        inner = self.accumulator.inner
        return list(super().param_groups) if inner is None else inner.param_groups

    @property
    def defaults(self) -> dict:
        return self.opt.defaults

    @property
    def use_local_updates(self) -> bool:
        return self.accumulator.inner is not None

    def _refuse_hook(self, *_args, **_options) -> NoReturn:
        raise NotImplementedError("CollaborativeOptimizer has no hooks: call your function before or after it")

    register_step_pre_hook = register_step_post_hook = _refuse_hook
    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook

    def __del__(self) -> None:  # hivemind's shuts down, also what `__init__` has not built
        pass


class CollaborativeOptimizer(_Interface):
    """A torch.optim.Optimizer whose steps all peers of a run take together, in one averaging round each.

    `step` adds a local step to the next global step. Once all peers together have `target_batch_size` samples, they
    average their gradients, and each takes the same step as one process with all samples would. hivemind.Optimizer
    gives `state_dict`, `param_groups` and `zero_grad`. Build it in the main thread, and call `shutdown` at the end.

    :param params: parameters of the model, which is on its device already, or groups of them
    :param optimizer: builds the optimizer for copies of them on the CPU. A float as `lr`
    :param peer: this peer of the run
    :param options: see Options
    :param scheduler: builds the schedule of the learning rate over global steps; default: constant
    :param local_updates: average what each peer has changed by local steps (DiLoCo) instead of gradients
    """

    shutdown_timeout = 5.0
    dht, run_id = shared("peer.dht"), shared("peer.run_id")
    target_batch_size, batch_size_per_step = shared("options.target_batch_size"), shared("options.batch_size_per_step")
    membership: Membership = shared("state_averager.membership")
    coordinator: RoundCoordinator = shared("steps.coordinator")
    distance: float = shared("state_averager.membership.distance")
    last_step: int | None = shared("steps.last_step")  # no step beyond this one is taken
    pace = shared("log.pace")  # how the newest rounds went
    on_round: Callable[[dict], object] | None = shared("log.on_round")  # takes what came of each round, as JSON

    def __init__(
        self,
        params: Iterable,
        optimizer: OptimizerBuilder,
        peer: LocalPeer,
        options: Options,
        *,
        scheduler: SchedulerBuilder = constant_schedule,
        local_updates: LocalUpdates | None = None,
    ):
        groups = _list_groups(params)
        peak_rate = max(group["lr"] for group in optimizer([dict(group) for group in groups]).param_groups)
        # hivemind's `__init__` builds its own tracker and averagers, and is not called.
        self.peer, self.options = peer, options
        self.num_dropped_gradients = 0
        self.num_computed = 0  # samples of the local steps, without those whose gradients were dropped
        self.num_lost = 0  # samples of this local step that its gradients lack
        self.state_averager = TrainingStateAverager(
            dht=peer.dht,
            public_key=peer.public_key,
            prefix=f"{peer.run_id}_state_averager",
            params=groups,
            **step_builders(optimizer, scheduler, local_updates),
            initialize_optimizer=False,  # see build_with_statistics
            offload_optimizer=True,
            state_compression=build_state_compression(options.load_state_compression),
            allow_state_sharing=False,  # until there is a trained state to share, see share_state
            credible_step=lambda: self.tracker.view().credible_step,
            download_timeout=options.load_state_timeout,
            donor_timeout=options.averaging_timeout,
            folder=options.folder,
            membership=Membership(),
            start=True,
        )
        self.grad_averager = RoundAverager(
            self.state_averager.layout.parameters,
            options,
            dht=peer.dht,
            prefix=f"{peer.run_id}_round_averager",
            private_key=peer.private_key,
            local_updates=local_updates is not None,
            learning_rate=peak_rate,
        )
        self.tracker = ProgressTracker(
            peer.dht, peer.run_id, options, public_key=peer.public_key, schema=self.grad_averager.schema_id
        )
        coordinator = RoundCoordinator(self.tracker, RoundClient(self.grad_averager), self.membership, options)
        self.model = SharedModel(self._build_accumulator(groups, optimizer, scheduler, local_updates))
        self.log = StepLog()
        self.joining = Joining(self.state_averager, self.tracker, self.model, self.log, coordinator.stopped)
        self.steps = StepThread(self.grad_averager, coordinator, self.model, self.joining, self.log)
        self.tracker.is_paused = lambda: self.membership.is_paused
        self.tracker.start()
        keep_free_memory()

    def _build_accumulator(
        self,
        groups: list[dict],
        optimizer: OptimizerBuilder,
        scheduler: SchedulerBuilder,
        local_updates: LocalUpdates | None,
    ) -> GradientAccumulator | LocalTraining:
        state, max_norm = self.state_averager, self.options.max_grad_norm
        tensors = state.main_parameters, state.layout.parameters, self.grad_averager.gradients
        if local_updates is None:
            return GradientAccumulator(*tensors, max_norm=max_norm)
        project = getattr(COMPRESSIONS[self.options.gradient_compression](), "project", None)
        bound = local_updates.max_norm
        return LocalTraining(groups, optimizer, scheduler, max_norm, *tensors, max_norm=bound, project=project)

    @property
    def processes(self) -> dict[str, multiprocessing.Process]:
        """The averagers' processes, by name. Training cannot continue without them."""
        return {"state averager": self.state_averager, "round averager": self.grad_averager}

    # Local steps, in the main thread

    def step(
        self, closure: Callable[[], object] | None = None, batch_size: int | None = None, grad_scaler=None
    ) -> object:
        """Record a local step. Waits for the global step if the step is due and not delayed.

        :param closure: computes the loss and its gradients
        :param batch_size: samples of this local step; default: `batch_size_per_step`. A step without samples counts
          nothing
        :returns: what the closure returns
        :raises ValueError: for hivemind's GradScaler, which gives wrong steps here; torch's works
        """
        if grad_scaler is not None:
            raise ValueError("use torch.amp.GradScaler, not hivemind's")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.steps.device_error is not None:
            raise self.steps.device_error
        if self.steps.ident is None:
            self.steps.start()
        self.pace.end_local_step()
        self.model.apply_update()
        if self.steps.needs_state(self.tracker.view()):
            logger.info("Out of sync with the collaboration")
            self.load_state_from_peers()
        elif self.accumulate(self.batch_size_per_step if batch_size is None else batch_size):
            self.steps.wait_for_step()
            self.model.apply_update()
        self.pace.begin_local_step()
        return loss

    def accumulate(self, num_samples: int) -> bool:
        """Accumulate the gradients of the model; False if one has NaN or Inf."""
        if num_samples < 0:
            raise ValueError(f"batch_size must be at least 0, and is {num_samples}")
        num_samples, self.num_lost = num_samples - self.num_lost, 0
        if num_samples <= 0:
            return True
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not all_finite(gradients):
            self.num_dropped_gradients += 1
            if self.num_dropped_gradients == 1 or self.num_dropped_gradients % 100 == 0:
                logger.warning(f"Dropped a gradient that is not finite ({self.num_dropped_gradients} so far)")
            return False
        self.num_computed += num_samples
        step = self.tracker.local_progress.epoch
        self.tracker.report_samples(self.accumulator.add(num_samples, self.local_epoch), step)
        return True

    def pop_records(self) -> list[StepRecord]:
        """Return what came of the global steps since the last call."""
        return self.log.pop()

    # The state

    def finish_pending_update(self) -> None:
        """Wait for the running step, if there is one, and copy its parameters to the model."""
        with self.model.frozen():
            pass

    def frozen_state(self) -> AbstractContextManager[None]:
        """Keep model, parameters and optimizer statistics at one step, with no step running."""
        return self.model.frozen()

    def saved_state(self) -> AbstractContextManager[list[torch.Tensor] | None]:
        """Give the model the parameters of the last global step, and keep the state there, for writing a checkpoint.

        A round may run: it changes none of them before it ends. Yields `unsent` of `begin_at`.
        """
        return self.model.saved()

    def is_synchronized_with_peers(self) -> bool:
        """Whether no larger side of the other trainers is ahead of this peer, or has another history."""
        return self.tracker.view().side_to_join is None

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue at the step of a state with its optimizer statistics, and with the parameters that the model has.

        Load the parameters into the model before.
        """
        state = dict(state_dict["state"])
        step = state.pop("local_epoch", self.local_epoch)
        with self.model.step_lock, self.model.update_lock:
            self.opt.load_state_dict({**state_dict, "state": state})
            self.model.has_update = False
            self.begin_at(step)

    def load_state_from_peers(self, **_kwargs) -> bool:
        """Download the newest state that a peer offers and that fits; without one, continue with this peer's state.

        If this peer is out of sync, only a state of the other side is used, also one of a lower step.
        """
        self.coordinator.call_off()
        return self.joining.load()

    def share_state(self) -> None:
        """Offer this peer's state to joining peers, unless others have a newer one. Call it once it is trained."""
        self.joining.share_state()

    def begin_at(self, step: int, unsent: Sequence[torch.Tensor] | None = None) -> None:
        """Start at global step `step` with the model of a checkpoint, and its local updates that were not sent."""
        self.state_averager.sync_with_main_parameters(step)
        self.distance = 0.0
        self.joining.forget_progress()
        if unsent is not None and isinstance(self.accumulator, LocalTraining):  # a state that is loaded drops them
            clip_norm(unsent, self.accumulator.bound())
            self.accumulator.rebase(unsent)

    def restore(self, metadata: dict, tensors: list[torch.Tensor]) -> None:
        """Replace the training state, as the state averager does, and drop the accumulated gradients."""
        with self.model.step_lock, self.model.update_lock:
            self.state_averager.restore(metadata, tensors)
            self.model.has_update, self.distance = False, 0.0
            self.log.clear()
            self.joining.forget_progress()
            self.accumulator.reset()

    def discard_local_updates(self) -> bool:
        """Return to the finite parameters of the last global step; False if the model has them already."""
        with self.frozen_state():
            if not self.accumulator.can_reset():
                return False
            self.joining.forget_progress()
            self.accumulator.reset()
            return True

    # A pause

    def pause(self, model: torch.nn.Module) -> None:
        """Take part in no step until `resume`, and free the device: the model and its gradients are on the CPU then.

        The others do not wait. A round that runs is not interrupted. Call it, and `resume`, between two local steps.
        """
        self.membership.is_paused = True
        self.tracker.set_away(True)
        model.zero_grad()
        self.accumulator.move(model, torch.device("cpu"))
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        return_free_memory()

    def resume(self, model: torch.nn.Module, device: torch.device) -> None:
        """Take part again. The others give this peer what it has missed, or it downloads a state, as after a sleep."""
        self.accumulator.move(model, device)
        self.membership.is_paused = False
        self.tracker.set_away(self.membership.is_away)
        self.tracker.refresh_in(0.0)
        self.pace.begin_local_step()

    # Shutdown

    def say_goodbye(self) -> None:
        """Announce departure now; pending rounds may outlast the shutdown grace period."""
        self.tracker.shutdown(self.shutdown_timeout)

    def stop_averaging(self) -> None:
        """Cancel the running round and end the step thread."""
        self.steps.stop(self.shutdown_timeout)

    def shutdown(self) -> None:
        self.say_goodbye()
        self.stop_averaging()
        try:
            self.model.apply_update()
        except Exception as error:  # of the device, which has ended training already: that error is to be seen
            logger.warning(f"The model lacks the newest step: {type(error).__name__}")
        self.state_averager.shutdown()
        self.grad_averager.shutdown()


def _list_groups(params: Iterable) -> list[dict]:
    """Return parameters, or groups of them, as groups; ValueError if there are none, as with frozen weights."""
    groups = list(params)
    if not all(isinstance(group, dict) for group in groups):
        groups = [{"params": groups}]
    groups = [{**group, "params": [*group["params"]]} for group in groups]
    if not any(group["params"] for group in groups):
        raise ValueError("optimizer got an empty parameter list")
    return groups
