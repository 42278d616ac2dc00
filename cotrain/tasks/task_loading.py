"""Loading of a task, the file of --task or the built-in task of a model, and of its model and samples."""

import inspect
import sys
import types
from pathlib import Path

import torch
from torch.utils.data import Dataset

from cotrain.common.errors import UserError
from cotrain.models.device import to_float
from cotrain.models.model import seeded_by
from cotrain.options import Adopted, ModelOptions
from cotrain.task import Task
from cotrain.tasks.text import build_text_task


def load_task(args: ModelOptions, adopted: Adopted, **options) -> Task:
    """Load the task of --task, or build that of --model_name_or_path; see `build_text_task` for the parameters.

    :raises UserError: if something is missing or does not fit
    """
    return build_text_task(args, adopted, **options) if args.task is None else read_task(Path(args.task))


def read_task(path: Path) -> Task:
    """Run a file that defines a task, and build the task.

    :raises UserError: if the file does not define one subclass of Task
    """
    path = path.resolve()
    module = types.ModuleType(f"task_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look there for the module of a class
    # Not imported: Python would take compiled code of another version if size and second of the change are equal.
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Task)]
    own = [task_class for task_class in classes if task_class.__module__ == module.__name__]
    if len(own) != 1:
        raise UserError(f"--task: '{path}' defines {len(own)} subclasses of cotrain.Task; it must define one")
    return own[0]()


def build_initial_model(task: Task, run_id: str) -> torch.nn.Module:
    """Build the model of a task, with initial weights that are seeded by the run ID alone, hence equal on all peers.

    :raises UserError: if the task does not build a model with parameters to train
    """
    with seeded_by(run_id):
        model = task.build_model()
        if not (isinstance(model, torch.nn.Module) and any(p.requires_grad for p in model.parameters())):
            path = inspect.getfile(type(task))
            raise UserError(f"'{path}': build_model must return a torch.nn.Module with parameters to train")
        return to_float(model)


def load_samples(task: Task, split: str) -> Dataset:
    """Load the samples of a task.

    :raises UserError: if there are none
    """
    samples = task.load_samples(split)
    if len(samples) == 0:
        raise UserError(f"'{inspect.getfile(type(task))}': load_samples has no samples of the split '{split}'")
    return samples
