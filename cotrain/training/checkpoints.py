"""Checkpoints of the training state on disk, written atomically.

A checkpoint is a folder `checkpoint-STEP` with the weights as model.safetensors and what the task saves beside them: a
text task also its configuration and tokenizer, so that `from_pretrained` opens the folder. It also holds the training
state as peers exchange it (parameters and optimizer statistics), in a file that `torch.load(weights_only=True)` opens.
Readers never see an incomplete checkpoint. A failed write leaves the previous checkpoint unchanged.
"""

import itertools
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from hivemind.utils import get_logger
from safetensors.torch import save_model

from cotrain.common.atomic_files import new_folder
from cotrain.common.errors import describe
from cotrain.common.run_folder import list_checkpoints, step_of
from cotrain.task import Task
from peerstep.state.averager import TrainingStateAverager
from peerstep.state.layout import all_finite

logger = get_logger(__name__)

STATE_FILE = "training_state.pt"
_FORMAT = 2


@dataclass
class SavedState:
    """The training state that peers exchange."""

    run_id: str
    metadata: dict  # `epoch` (the global step), `statistics` (the names of the optimizer statistics) and `marks`
    tensors: list[torch.Tensor]  # the parameters in the order of the param groups, then the optimizer statistics
    unsent: list[torch.Tensor] | None = None  # local updates that sparse rounds have not taken, of each parameter

    @property
    def step(self) -> int:
        return self.metadata["epoch"]


def load_training_state(path: Path, run_id: str) -> SavedState:
    """Load a training state to the CPU; ValueError if the file is damaged, no training state, or of another run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(describe(error)) from None
    except Exception as error:
        logger.debug(f"{path} cannot be read: {error!r}")
        raise ValueError(f"{path} is damaged or incomplete; copy it again, or remove its folder") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a training state of this version")
    if content.get("run_id") != run_id:
        raise ValueError(f"{path} belongs to the run '{content.get('run_id')}', not to '{run_id}'")
    return SavedState(run_id, content["metadata"], content["tensors"], content.get("unsent"))


def _save(content: dict, path: Path) -> None:
    """Save with PyTorch, whose own error on a full disk says "unexpected pos": raise that of the system instead."""
    try:
        with open(path, "wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def write_model(folder: Path, task: Task, model: torch.nn.Module) -> None:
    """Write the files of a checkpoint by which a model is used, into an existing folder."""
    task.save_pretrained(model, folder)
    if not any(folder.glob("*model*.safetensors")):  # peft's are adapter_model.safetensors
        save_model(model, folder / "model.safetensors")


def save_checkpoint(folder: Path, task: Task, model: torch.nn.Module, state: SavedState, info: dict) -> Path:
    """Write `checkpoint-STEP` into a folder: model, training state, and `info` as collaboration.json."""
    path = folder / f"checkpoint-{state.step}"
    if path.is_dir() and not (path / STATE_FILE).exists():
        logger.warning(f"'{path}' is of another program: renamed it to {_set_aside(path).name}")
    with new_folder(path, "--output_dir", overwrite=True, replaceable=(STATE_FILE,)) as temporary:
        write_model(temporary, task, model)
        content = {"format": _FORMAT, "run_id": state.run_id, "metadata": state.metadata, "tensors": state.tensors}
        if state.unsent is not None:  # in bfloat16, since rounds send 4 bits
            content["unsent"] = [tensor.to("cpu", torch.bfloat16) for tensor in state.unsent]
        _save(content, temporary / STATE_FILE)
        description = {"run_id": state.run_id, "step": state.step, **info}
        (temporary / "collaboration.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return path


def restore_newest(folder: Path, run_id: str, averager: TrainingStateAverager) -> SavedState | None:
    """Restore and return the newest checkpoint that is readable and fits the model; warn of each newer one."""
    for path in list_checkpoints(folder):
        try:
            state = load_training_state(path / STATE_FILE, run_id)
            averager.restore(state.metadata, state.tensors)
            parameters = state.tensors[: len(state.tensors) - len(state.metadata["statistics"])]
            fits = [tensor.shape for tensor in state.unsent or ()] == [parameter.shape for parameter in parameters]
            if state.unsent is not None and not (fits and all_finite(state.unsent)):
                logger.warning(f"Resuming {path} without the updates that were not sent: they do not fit the model")
                state.unsent = None
            return state
        except ValueError as error:
            logger.warning(f"Skipping {path}: {error}")
    return None


def rotate_checkpoints(newest: Path, keep: int, keep_hourly: int = 0) -> None:
    """Remove old checkpoints after `newest` has been written, and set those of later steps aside.

    These are of a history that the run has left, and would be the newest for ever.

    :param keep: number of checkpoints to keep, and of those set aside
    :param keep_hourly: also keep the first checkpoint of each of this many hours before
    """
    later = list(itertools.takewhile(newest.__ne__, list_checkpoints(newest.parent)))
    if later:
        names = ", ".join(f"{path.name} as {_set_aside(path).name}" for path in later)
        logger.warning(f"The run has gone back to step #{step_of(newest)}: set aside {names} in '{newest.parent}'")
    complete = [path for path in list_checkpoints(newest.parent) if os.path.isfile(path / STATE_FILE)]
    first = {(path / STATE_FILE).stat().st_mtime // 3600: path for path in complete[keep:]}  # of each hour, by step
    left = [path for path in newest.parent.glob("checkpoint-*.*") if os.path.isfile(path / STATE_FILE)]
    left.sort(key=lambda path: path.suffix, reverse=True)  # the time at which it was set aside
    superfluous = set(complete[keep:]).difference(list(first.values())[:keep_hourly])
    for path in [*superfluous, *left[keep + keep_hourly :]]:
        # Renamed first: a partly removed folder must not look like a checkpoint.
        hidden = path.with_name(f".{path.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    """Rename a folder so that it is no checkpoint any more, and return its new path."""
    return path.rename(path.with_name(f"{path.name}.{time.time_ns()}"))
