"""Start of a trainer script: its command line, and what it does instead of training."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cotrain.common.alerts import Alerts, announced_end
from cotrain.common.atomic_files import require_free
from cotrain.common.errors import TemporaryError, UserError, announce_imports, require_packages
from cotrain.common.run_folder import list_checkpoints, step_of
from cotrain.common.signals import StopSignal
from cotrain.data.manifest import Manifest
from cotrain.options import NOTHING, TrainerOptions
from cotrain.status.pause import request_pause
from cotrain.status.status import describe_last_step, recorded_start, show_status

if TYPE_CHECKING:
    from cotrain.common.argument_parser import CommandLine

LAST_STEP_SECONDS = 20.0  # for which a stopped trainer waits for a monitor to save a step that nobody else has
STOP_GRACE = 12.0 + LAST_STEP_SECONDS  # seconds from a signal to the end


def start_trainer(
    train: Callable[[TrainerOptions, StopSignal], None], dataclass_types: Sequence[type], description: str | None
) -> None:
    """Parse the command line, and train with the settings of the run, or do what --status, --pause, --check ask for.

    :param dataclass_types: of the flags: those of `TrainerOptions`, in its order
    """
    with StopSignal(STOP_GRACE) as stop:
        from cotrain.common.argument_parser import ArgumentParser

        command_line = ArgumentParser(dataclass_types, description).parse()
        args = TrainerOptions._make((*command_line.arguments, NOTHING))
        if command_line.values.get("status"):
            sys.exit(show_status(Path(args.training.output_dir)))
        for name in ("pause", "resume"):
            if command_line.values.get(name):
                sys.exit(request_pause(Path(args.training.output_dir), name == "pause"))
        if command_line.values.get("check"):
            announce_imports()
            from cotrain.training.check import check_trainer

            sys.exit(check_trainer(command_line, stop))
        require_packages(command_line.arguments)  # before a file is written
        require_free(Path(args.training.output_dir), "--output_dir")
        require_run(command_line, args)
        announce_imports()
        with recorded_start(Path(args.training.output_dir)):
            from cotrain.peer.adoption import find_run_config
            from cotrain.peer.tunnel import open_tunnel

            try:
                args = find_run_config(command_line, stop).to_options()
            except TemporaryError:
                _exit_if_finished(Path(args.training.output_dir))
                raise
            name = args.collaboration.username or "this peer"
            alerts = Alerts(args.collaboration.webhook_file, f"Trainer {name} of run {args.collaboration.run_id}")
            with announced_end(alerts, stop.is_set), open_tunnel(args.collaboration):
                train(args, stop)


def require_run(command_line: "CommandLine", args: TrainerOptions) -> None:
    """Raise UserError if there is neither a run to join nor the data of a new one."""
    if not args.collaboration.initial_peers:
        args.dataset.check_tokenizer(command_line.stated)
    if not args.collaboration.initial_peers and args.dataset.lacks_tokenizer:
        raise UserError(
            "--initial_peers is missing: pass the address that the monitor or a trainer of the run prints. To "
            "begin a run, prepare its data first with ./tokenize_wikitext103.py, or pass --dataset_url"
        )
    if not args.collaboration.initial_peers and args.dataset.task is None and args.dataset.dataset_url is None:
        Manifest.load(args.dataset.dataset_path)  # a folder that is missing or damaged: now, not after slow imports


def _exit_if_finished(folder: Path) -> None:
    """Exit with 0 if the newest checkpoint is of the last step: a service has started a trainer whose run is over."""
    with contextlib.suppress(IndexError, OSError, ValueError, KeyError, TypeError):  # no checkpoint, or an older one
        newest = list_checkpoints(folder)[0]
        last_step = json.loads((newest / "collaboration.json").read_text(encoding="utf-8"))["last_step"]
        if step_of(newest) >= last_step:
            print(f"{describe_last_step(last_step)} The model is in '{newest}'")
            sys.exit(0)
