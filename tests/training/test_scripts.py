"""Both trainer scripts, from the arguments to the last checkpoint, with an optimizer that averages with nobody."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

import run_custom_trainer
import run_trainer
import utils
from arguments import TrainerArguments
from lib.common.processes import StopSignal
from lib.peer import lifecycle
from lib.training import optimizer as builders
from lib.training import session, task
from lib.training.checkpoints import STATE_FILE, list_checkpoints, load_training_state
from lib.training.model import build_model
from lib.training.status import read_status
from tests.support.fakes import (
    FAKE_PEER,
    FakeStateAverager,
    FakeTokenizer,
    FakeTracker,
    collate,
    make_arguments,
    make_batch,
)
from tests.support.swarm import CONFIG


class LoneOptimizer(torch.optim.SGD):
    """Optimizer with the interface of CollaborativeOptimizer, for which each local step is a global one."""

    target_batch_size, local_progress, processes, dht = 8, SimpleNamespace(samples_per_second=1.0), {}, None
    saved_state = frozen_state = staticmethod(contextlib.nullcontext)

    def __init__(self, model: torch.nn.Module):
        super().__init__(model.parameters(), lr=0.01)
        self.tracker, self.state_averager = FakeTracker(), FakeStateAverager(model, 0, None)
        self.recent_rounds = []
        self.local_epoch = self.num_computed = 0
        self.has_ended = False

    def step(self, *args, **kwargs) -> None:
        super().step()
        self.num_computed += 8
        self.local_epoch += 1
        self.state_averager.step = self.tracker.local_progress.completed = self.local_epoch
        self.round_log.write({"step": self.local_epoch, "outcome": "alone", "samples": 8, "error": "", "weights": {}})

    def pop_steps(self) -> list[tuple[int, int]]:
        return [(self.local_epoch, 8)]

    def load_state_from_peers(self) -> bool:
        return False

    def is_synchronized_with_peers(self) -> bool:
        return True

    def finish_pending_update(self) -> None:
        pass

    def shutdown(self) -> None:
        self.has_ended = True

    stop_averaging = finish_pending_update


def run(patch: pytest.MonkeyPatch, script, peer, args: TrainerArguments, size: int, num_devices: int = 1) -> None:
    """Run a trainer script with a peer and some samples, on the CPU or on GPUs."""
    dataset = Dataset.from_dict({name: values.tolist() for name, values in make_batch(size=size).items()})
    device = torch.device("cpu" if args.training.use_cpu else "cuda")
    loaded = task.Task(FakeTokenizer(), dataset, collate, build_model(CONFIG, "run"), device, num_devices)
    patch.setattr(task, "load_task", lambda _args: loaded)
    patch.setattr(lifecycle, "open_peer", lambda *_args: contextlib.nullcontext(peer))
    patch.setattr(lifecycle, "exit_after", lambda *_args: None)
    with StopSignal() as stop:
        script.train(args, stop)


@pytest.mark.parametrize("script", [run_trainer, run_custom_trainer])
def test_script_trains_saves_and_reports(tmp_path, monkeypatch, script):
    published, optimizers = [], []
    monkeypatch.setattr(utils, "store_record", lambda _dht, key, *_record: published.append(key))
    monkeypatch.setattr(utils, "get_dictionary", lambda *_args: {})
    monkeypatch.setattr(session, "RunConfigRelay", SimpleNamespace(of_run=lambda *_args: None))

    def build_optimizer(model, _peer, batch_size_per_step: int, _args) -> LoneOptimizer:
        assert batch_size_per_step == 8
        optimizers.append(LoneOptimizer(model))
        return optimizers[-1]

    monkeypatch.setattr(builders, "build_optimizer", build_optimizer)
    training = {"use_cpu": True, "save_steps": 2}
    args = make_arguments(tmp_path, training, run_id="run", max_global_steps=5, leave_timeout=0.0)
    run(monkeypatch, script, FAKE_PEER, args, size=20)
    assert [path.name for path in list_checkpoints(Path(tmp_path))] == ["checkpoint-5", "checkpoint-4"]
    state = load_training_state(tmp_path / "checkpoint-5" / STATE_FILE, "run")
    assert state.step == 5 and (tmp_path / "checkpoint-5" / "model.safetensors").is_file()
    status = read_status(tmp_path)
    assert (status.step, status.joined, status.missed, status.applied) == (5, 5, 0, 40)
    assert status.ended_at is not None and status.loss is not None and optimizers[0].has_ended
    assert {"run_metrics", "run_history", "run_rounds", "run_peers"} == set(published)
