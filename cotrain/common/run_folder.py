"""The run of an output folder, and the checkpoints in it.

A folder belongs to one run at a time: volunteers of several runs all have `outputs`. What another run has left in it
is moved to `other-runs/RUN_ID` inside, and back once a peer of that run starts again.
"""

import contextlib
import hashlib
import json
import logging
import re
import sys
import time
from pathlib import Path
from urllib.parse import quote

from cotrain.common.errors import UserError
from cotrain.common.json_file import write_json
from cotrain.common.stand_ins import find_damage

logger = logging.getLogger(__name__)

OWNER_FILE = "run.json"
# What belongs to a run and is kept. A peer's identity stays, and dashboards, which have a project for each run.
PATTERNS = (
    "checkpoint-[0-9]*",
    "metrics.jsonl",
    "evaluations.jsonl",
    "rounds.jsonl*",
    "contributors.json",
    "wandb_run_id",
)
CHECKPOINT_REMEDY = (
    "pass a folder with config.json, model.safetensors and a tokenizer, or an --output_dir with a checkpoint"
)
ADAPTERS = "adapter_config.json"  # of peft
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
MAX_NAME = 200  # bytes of a folder's name: most file systems take 255


def claim_folder(folder: Path, run_id: str) -> None:
    """Make a folder that of a run. The caller holds the folder's lock."""
    owner = find_run(folder) or run_id
    places = {run: folder / "other-runs" / _folder_name(run) for run in (owner, run_id)}
    if owner != run_id:
        _move_run(folder, places[owner])
        logger.warning(
            f"'{folder}' was that of run '{owner}', whose checkpoints and metrics are in '{places[owner]}' now"
        )
    write_json(folder / OWNER_FILE, {"run_id": run_id})
    _move_run(places[run_id], folder)


def find_run(folder: Path) -> str | None:
    """Return the run that a folder belongs to; None if no file says it."""
    for name in (OWNER_FILE, "status.json", "contributors.json", "checkpoint-*/collaboration.json"):
        for path in folder.glob(name):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if run_id := json.loads(path.read_text(encoding="utf-8"))["run_id"]:  # none while a trainer starts
                    return str(run_id)
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, highest step first, by name: modification times are not reliable."""
    found = [path for path in folder.glob("checkpoint-*") if path.is_dir() and _CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(_CHECKPOINT_NAME.fullmatch(path.name)[1])


def find_checkpoint(folder: Path) -> Path:
    """Return a folder if it is a checkpoint, otherwise the newest complete checkpoint in it.

    :raises UserError: if there is none
    """
    if not folder.is_dir():
        raise UserError(f"CHECKPOINT: there is no folder '{folder}'; {CHECKPOINT_REMEDY}")
    faults = []  # of the folder and its newest checkpoints
    for path in (folder, *list_checkpoints(folder)):
        if (fault := _find_fault(path)) is None:
            if faults[1:]:
                print(f"warning: {faults[1]}: taking the older '{path}'", file=sys.stderr)
            return path
        faults.append(fault)
    raise UserError(f"CHECKPOINT: {faults[:2][-1]}; {CHECKPOINT_REMEDY}")


def _find_fault(folder: Path) -> str | None:
    """Return what is missing or damaged in the folder of a model; None if nothing is."""
    try:
        has_config = any((folder / name).is_file() for name in ("config.json", ADAPTERS))
        has_tokenizer = (folder / "tokenizer_config.json").is_file()
        if not (has_config and has_tokenizer and any(folder.glob("*model.safetensors*"))):
            return f"there is no complete checkpoint in '{folder}'"
        return next(filter(None, map(find_damage, folder.iterdir())), None)
    except OSError as error:
        return f"'{folder}' cannot be read ({error.strerror or error})"


def _folder_name(run_id: str) -> str:
    name = quote(run_id, safe="")
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:16]
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 20]}-{digest}"


def _move_run(source: Path, target: Path) -> None:
    """Move the files of a run to a folder of the same file system. What is in the way gets another name."""
    for path in [path for pattern in PATTERNS for path in source.glob(pattern)]:
        target.mkdir(parents=True, exist_ok=True)
        if (target / path.name).exists():
            (target / path.name).rename(target / f"{path.name}.{time.time_ns()}")
        path.rename(target / path.name)
