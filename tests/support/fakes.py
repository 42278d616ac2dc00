"""Fakes: samples, a task, and the objects that a session or a checkpoint keeper uses."""

import contextlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from hivemind.utils.timed_storage import ValueWithExpiration
from transformers import PretrainedConfig

from arguments import (
    CollaborationArguments,
    DatasetArguments,
    LocalTrainingArguments,
    ModelArguments,
    ProgressTrackerArguments,
)
from cotrain.options import NOTHING, TrainerOptions
from cotrain.peer.relay import RunConfigRelay
from cotrain.task import Task
from cotrain.tasks.text import TextTask
from cotrain.training.checkpoints import SavedState
from cotrain.training.session import TrainingSession
from peerstep.peer.processes import Watchdog


def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}


FAKE_DHT = SimpleNamespace(
    peer_id="QmFake", pid=os.getpid(), is_alive=lambda: True, get_visible_maddrs=list, check_invitation=lambda: None,
    is_open=True, client_mode=False, store=lambda *_args, **_options: SimpleNamespace(result=lambda timeout: None),
)  # fmt: skip
FAKE_PEER = SimpleNamespace(dht=FAKE_DHT, public_key=b"key", private_key=None, run_id="run")


def storing_peer(stored: dict, public_key: bytes = b"key") -> SimpleNamespace:
    """Return a fake peer whose records go to `stored`: key -> subkey -> record."""

    def store(key, value, expiration_time, subkey, return_future):
        stored.setdefault(key, {})[subkey] = ValueWithExpiration(value, expiration_time)
        return SimpleNamespace(result=lambda timeout: None)

    return SimpleNamespace(
        dht=SimpleNamespace(**{**vars(FAKE_DHT), "store": store}), public_key=public_key, run_id="run"
    )


class FakeTracker:
    """Progress tracker of a trainer that knows the reports of other live trainers, and its view.

    :param others: the `epoch` of each, and its `samples_per_second`
    """

    options = SimpleNamespace(default_refresh_period=0.1)
    misfits = frozenset()
    credible_step = None

    def __init__(self, epoch: int = 0, others: Sequence[tuple[int, float]] = ()):
        self.local_progress = SimpleNamespace(
            epoch=epoch, completed=epoch, samples_accumulated=0, contributed=0, samples_per_second=0.0,
            client_mode=False,
        )  # fmt: skip
        self.others = [
            SimpleNamespace(epoch=step, samples_per_second=rate, client_mode=False) for step, rate in others
        ]
        self.all_samples, self.seconds_to_step = 0, float("inf")

    @property
    def estimate(self) -> tuple[int, float]:
        return self.all_samples, self.seconds_to_step

    def view(self) -> "FakeTracker":
        return self

    def refresh(self) -> bool:
        return True

    @property
    def own(self) -> SimpleNamespace:
        return self.local_progress

    @property
    def live(self) -> list[SimpleNamespace]:
        return self.others


def make_text_task(config: PretrainedConfig, tokenizer: object | None = None) -> TextTask:
    """Make the task of a model, without data."""
    tokenizer = SimpleNamespace(pad_token="[PAD]", init_kwargs={}) if tokenizer is None else tokenizer
    return TextTask(ModelArguments(), NOTHING, tokenizer, config)


class FakeTask(Task):
    """A task whose batches come from `make_batch`."""

    def collate(self, samples: list[dict]) -> dict[str, torch.Tensor]:
        return collate(samples)


def make_arguments(
    folder: Path, training: dict | None = None, dataset: DatasetArguments | None = None, **options
) -> TrainerOptions:
    """Build the arguments of a trainer of an output folder.

    :param training: of LocalTrainingArguments
    :param options: of CollaborationArguments
    """
    local = {"output_dir": str(folder), "dataloader_num_workers": 0, "disable_tqdm": True, **(training or {})}
    return TrainerOptions(
        LocalTrainingArguments(**local), dataset or DatasetArguments(), CollaborationArguments(**options),
        ProgressTrackerArguments(), NOTHING,
    )  # fmt: skip


def make_state(step: int) -> SavedState:
    return SavedState("run", {"epoch": step, "statistics": []}, [torch.full((100, 100), float(step))])


class FakeAverager:
    """Averager whose download returns the state of one step, with the marks `offered_marks`."""

    marks = offered_marks = ()

    def __init__(self, step: int):
        self.step, self.offered_step, self.local_epoch = step, None, 0

    def download_state(self, min_step: int):
        return ("donor", *self.snapshot()) if self.step >= min_step else None

    def restore(self, metadata, tensors) -> None:
        self.local_epoch, self.marks = metadata["epoch"], metadata.get("marks", ())

    def snapshot(self):
        state = make_state(self.step)
        return {**state.metadata, "marks": self.offered_marks}, state.tensors

    def frozen_state(self):
        return nullcontext(self.snapshot())

    def offer(self, priority: float) -> None:
        self.offered_step = priority + 0.5


class FakeStateAverager(FakeAverager):
    """State averager of a trainer whose parameters become NaN or Inf.

    :param offered: the step of the state that other peers offer, None if they offer none
    """

    def __init__(self, model, step: int, offered: int | None):
        super().__init__(step)
        self.model, self.offered = model, offered

    def download_state(self, min_step: int):
        if self.offered is None or self.offered < min_step:
            return None
        return "donor", {"epoch": self.offered, "statistics": []}, []

    def restore(self, metadata, tensors) -> None:
        super().restore(metadata, tensors)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float(metadata["epoch"]))


def make_session(folder: Path, offered: int | None, peer: SimpleNamespace = FAKE_PEER, **flags) -> TrainingSession:
    """Build a session at step 9 with a fake optimizer.

    :param offered: the step of the state that other peers offer, None if they offer none
    """
    model = torch.nn.Linear(2, 2)
    state_averager = FakeStateAverager(model, 9, offered)
    optimizer = SimpleNamespace(
        local_epoch=9, state_averager=state_averager, frozen_state=contextlib.nullcontext,
        saved_state=contextlib.nullcontext, restore=state_averager.restore, discard_local_updates=lambda: False,
        target_batch_size=8, pop_records=list, num_computed=0, tracker=FakeTracker(epoch=9), dht=None,
        pace=SimpleNamespace(recent_rounds=[], averaging_share=None),
    )  # fmt: skip
    args, relay = make_arguments(folder, run_id="run", **flags), RunConfigRelay(peer, None, lifetime=0.0)
    return TrainingSession(peer, optimizer, FakeTask(), model, args, lambda: False, Watchdog({}), relay)
