"""The collaborative optimizer: hivemind.Optimizer with one averaging round per global step.

The main thread accumulates gradients. A second thread, the step thread, watches the progress of all peers. When a
global step is due, it takes the accumulated gradients, averages them with the other peers, and runs the optimizer on
the offloaded parameters. The main thread copies these to the model at its next local step. A peer with long local
steps therefore takes part in each round, with the gradients that it has.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

import hivemind
import torch
from hivemind.utils import get_logger

from peerstep.accumulators import GradientAccumulator, clip_norm
from peerstep.compression import COMPRESSIONS, build_state_compression
from peerstep.coordinator import RoundCoordinator, StepRecord
from peerstep.joining import Joining
from peerstep.local_updates import LocalTraining, LocalUpdates, step_builders
from peerstep.membership import Membership, shared
from peerstep.optimizer_state import OptimizerBuilder, SchedulerBuilder, constant_schedule
from peerstep.progress import ProgressTracker, TrackerOptions
from peerstep.rounds import RoundAverager
from peerstep.shared_model import SharedModel
from peerstep.state import TrainingStateAverager
from peerstep.state_layout import all_finite
from peerstep.step_log import StepLog
from peerstep.step_thread import StepThread
from peerstep.swarm import Swarm

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
    :param swarm: this peer of the run
    :param target_batch_size: samples of a global step, of all peers together
    :param batch_size_per_step: samples of a local step; `step` may be told others
    :param scheduler: builds the schedule of the learning rate over global steps; default: constant
    :param local_updates: average what each peer has changed by local steps (DiLoCo) instead of gradients
    :param max_grad_norm: norm to which the average is clipped, or with `local_updates` the gradient of a local step
    :param gradient_compression, parameter_compression: of rounds, keys of COMPRESSIONS, the same at all peers
    :param state_compression: of the state that newcomers download from this peer
    :param average_parameters_every: global steps from one average of the parameters to the next
    :param target_group_size: peers of a group at most
    :param bandwidth: upload in Mbit/s; default: measured in rounds
    :param delay_grad_averaging: compute the next gradients during a round
    :param delay_optimizer_step: compute the next gradients while the step is taken. Set both or the first to False
    :param batch_size_lead: samples before the target at which the search for a group begins at the latest
    :param matchmaking_time: seconds before a step is due at which the search for its group starts, and for which a
      group waits for a late peer; hivemind needs more than 3
    :param averaging_timeout: seconds after which a round ends with what has arrived, and for which a donor of a state
      may be silent. A peer that is silent for a quarter of them is left out of the round
    :param load_state_timeout: seconds for the download of a state
    :param folder: on a disk, for the copies that others download; default: that for temporary files
    """

    shutdown_timeout = 5.0
    dht, run_id = shared("swarm.dht"), shared("swarm.run_id")
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
        swarm: Swarm,
        *,
        target_batch_size: int,
        batch_size_per_step: int,
        scheduler: SchedulerBuilder = constant_schedule,
        local_updates: LocalUpdates | None = None,
        max_grad_norm: float = 1.0,
        gradient_compression: str = "float16",
        parameter_compression: str = "float16",
        state_compression: str = "float16",
        average_parameters_every: int = 8,
        target_group_size: int = 256,
        bandwidth: float | None = None,
        delay_grad_averaging: bool = True,
        delay_optimizer_step: bool = True,
        batch_size_lead: int = 0,
        matchmaking_time: float = 5.0,
        averaging_timeout: float = 60.0,
        load_state_timeout: float = 600.0,
        tracker_options: TrackerOptions = TrackerOptions(),  # noqa: B008  frozen
        folder: Path | None = None,
    ):
        if delay_grad_averaging and not delay_optimizer_step:
            raise ValueError("delay_grad_averaging needs delay_optimizer_step")
        groups = _list_groups(params)
        peak_rate = max(group["lr"] for group in optimizer([dict(group) for group in groups]).param_groups)
        # hivemind's `__init__` builds its own tracker and averagers, and is not called.
        self.swarm, self.target_batch_size, self.batch_size_per_step = swarm, target_batch_size, batch_size_per_step
        self.num_dropped_gradients = 0
        self.num_computed = 0  # samples of the local steps, without those whose gradients were dropped
        self.is_incomplete = False  # whether the gradients of this local step lack a micro-batch: they are dropped
        dht, compression = swarm.dht, COMPRESSIONS[gradient_compression]()
        self.state_averager = TrainingStateAverager(
            dht=dht,
            public_key=swarm.public_key,
            prefix=f"{swarm.run_id}_state_averager",
            params=groups,
            **step_builders(optimizer, scheduler, local_updates),
            initialize_optimizer=False,  # see build_with_statistics
            offload_optimizer=True,
            state_compression=build_state_compression(state_compression),
            allow_state_sharing=False,  # until there is a trained state to share, see share_state
            credible_step=lambda: self.tracker.view().credible_step,
            download_timeout=load_state_timeout,
            donor_timeout=averaging_timeout,
            folder=folder,
            membership=Membership(),
            start=True,
        )
        self.grad_averager = RoundAverager(
            self._offloaded_parameters(),
            dht=dht,
            prefix=f"{swarm.run_id}_round_averager",
            private_key=swarm.private_key,
            local_updates=local_updates is not None,
            learning_rate=peak_rate,
            max_weight=float(target_batch_size),  # a peer counts for a whole step at most
            gradient_compression=compression,
            parameter_compression=COMPRESSIONS[parameter_compression](),
            average_parameters_every=average_parameters_every,
            target_group_size=target_group_size,
            bandwidth=bandwidth,
            min_matchmaking_time=matchmaking_time,
            allreduce_timeout=averaging_timeout,
            # Seconds of silence after which a peer is excluded from a round. hivemind's default is
            # `matchmaking_time`, which busy machines and slow connections exceed.
            next_chunk_timeout=max(matchmaking_time, averaging_timeout / 4),
        )
        tensors = self.state_averager.main_parameters, self._offloaded_parameters(), self.grad_averager.gradients
        if local_updates is None:
            accumulator = GradientAccumulator(*tensors, max_norm=max_grad_norm)
        else:
            bound, project = local_updates.max_norm, getattr(compression, "project", None)
            accumulator = LocalTraining(
                groups, optimizer, scheduler, max_grad_norm, *tensors, max_norm=bound, project=project
            )
        self.tracker = ProgressTracker(
            dht,
            swarm.run_id,
            target_batch_size,
            tracker_options,
            public_key=swarm.public_key,
            schema=self.grad_averager.schema_id,
        )
        coordinator = RoundCoordinator(
            self.tracker, self.grad_averager, self.membership, matchmaking_time, averaging_timeout, batch_size_lead
        )
        self.model, self.log = SharedModel(accumulator), StepLog()
        self.joining = Joining(self.state_averager, self.tracker, self.model, self.log, coordinator.stopped)
        self.steps = StepThread(
            self.grad_averager,
            coordinator,
            self.model,
            self.joining,
            self.log,
            delay_grad_averaging=delay_grad_averaging,
            delay_optimizer_step=delay_optimizer_step,
        )
        self.tracker.start()

    def _offloaded_parameters(self) -> list[torch.Tensor]:
        return self.state_averager.layout.parameters

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
        elif self._accumulate(self.batch_size_per_step if batch_size is None else batch_size):
            self.steps.wait_for_step()
            self.model.apply_update()
        self.pace.begin_local_step()
        return loss

    def _accumulate(self, num_samples: int) -> bool:
        """Accumulate the gradients of the model; False if one has NaN or Inf, or they are incomplete."""
        if self.is_incomplete:
            self.is_incomplete = False
            return False
        if num_samples < 0:
            raise ValueError(f"batch_size must be at least 0, and is {num_samples}")
        if num_samples == 0:
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
        """Offer this peer's state to joining peers. Call it once there is a trained state."""
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
