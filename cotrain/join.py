"""Training in a script of one's own: `join_run`."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from cotrain.common.argument_parser import KeywordParser
from cotrain.common.atomic_files import lock_folder
from cotrain.common.errors import UserError, report_uncaught_errors
from cotrain.common.signals import StopSignal
from cotrain.dht.run_records import record_schemas
from cotrain.models.device import choose_kernels, to_float
from cotrain.models.model import seeded_by
from cotrain.options import TRAINER_OPTIONS
from cotrain.peer.adoption import find_run_config
from cotrain.peer.peer import open_peer
from cotrain.peer.tunnel import open_tunnel
from cotrain.status.status import recorded_start
from cotrain.task import Task
from cotrain.training.builders import build_optimizer
from cotrain.training.hf_trainer import choose_devices
from cotrain.training.loop import TrainingLoop, open_loop
from cotrain.training.session import open_session
from cotrain.training.start import STOP_GRACE
from peerstep.peer.processes import call_off_exits


@contextlib.contextmanager
def join_run(
    model: torch.nn.Module | Callable[[], torch.nn.Module], batch_size: int, **flags: object
) -> Iterator[TrainingLoop]:
    """Join a run, or begin one, and train in the block. Call it in the main thread. See examples/plain_loop.py.

    The block resumes from the checkpoint in `output_dir` and from the state of the other peers. SIGINT and SIGTERM end
    the block, not the script. No child process outlives it.

    :param model: a class or function that builds the model. It is called with the random seed of the run, so the
        initial weights are equal on all peers. A module is for weights that are equal anyway, such as pretrained ones;
        trainers with other initial weights do not average with each other, and a newcomer with others ends
    :param batch_size: samples of each loss
    :param flags: those of run_trainer.py, see cotrain/settings.py and cotrain/options.py. The settings of the run are
        taken from `initial_peers`, if there are any.
        Default of `output_dir`: the first of outputs, outputs-2, ... that no running peer uses
    :raises UserError: if a flag is wrong or differs from the run's, or no peer answers
    """
    report_uncaught_errors()
    with contextlib.ExitStack() as stack:
        stack.callback(call_off_exits)
        stop = stack.enter_context(StopSignal(STOP_GRACE))
        own_flags = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 1, **flags}
        own_flags["output_dir"] = flags.get("output_dir") or _lock_free_folder(stack)
        command_line = KeywordParser(TRAINER_OPTIONS, "join_run").parse_keywords(own_flags)
        stack.enter_context(recorded_start(Path(own_flags["output_dir"])))
        args = find_run_config(command_line, stop).to_options()
        run_args, output_dir = args.collaboration, Path(args.training.output_dir)
        if not isinstance(model, torch.nn.Module):
            with seeded_by(run_args.run_id):
                model = model()
            model.to(choose_devices(args.training)[0])
        choose_kernels(model, args.training, num_gpus=int(next(model.parameters()).device.type != "cpu"))
        to_float(model)

        # DHT peer
        stack.enter_context(open_tunnel(run_args))
        schemas = record_schemas(run_args.run_id)
        peer = stack.enter_context(open_peer(run_args, schemas, output_dir, run_args.client_mode, stop))

        # The collaborative optimizer, around LAMB, AdamW or Muon
        weights = fingerprint(model)
        optimizer = build_optimizer(model, peer, args.training.batch_size_per_step(num_devices=1), args)
        stack.callback(optimizer.shutdown)
        optimizer.tracker.schema += weights  # before the first report: trainers with another schema are ignored

        # Session: joining, metrics, rollback, checkpoints
        session = stack.enter_context(open_session(peer, optimizer, Task(), model, args, stop))

        # The caller's loop
        yield stack.enter_context(open_loop(session, args.training, next(model.parameters()).device))


def _lock_free_folder(stack: contextlib.ExitStack) -> str:
    """Lock the first of outputs, outputs-2, outputs-3, ... that is free, until the stack closes."""
    for folder in itertools.chain(["outputs"], map("outputs-{}".format, itertools.count(2))):
        with contextlib.suppress(UserError):
            stack.enter_context(lock_folder(Path(folder), "output_dir", ".join"))
            return folder


def fingerprint(model: torch.nn.Module) -> str:
    """Return some digits that are equal for equal weights: projections on random signs, in tenths of a norm.

    Not a hash: one seed gives weights that differ in the last bit between processors with and without AVX2. That
    changes the digits in one run of 10^5. Other weights have the same digits in one of 10^5.
    """
    generator, sums = torch.Generator().manual_seed(0), torch.zeros(4, dtype=torch.float64)
    size = min(2**20, max(parameter.numel() for parameter in model.parameters())) + 2**12
    all_signs = 2.0 * torch.randint(2, (len(sums), size), generator=generator).double() - 1.0
    for number, parameter in enumerate(model.parameters()):
        weights = parameter.detach().flatten().split(2**20)[0].cpu().double()  # MPS has no float64
        first = 997 * number % 2**12  # other signs for each tensor; drawing them took 0.31 s for a million elements
        sums += all_signs[:, first : first + len(weights)] @ weights / weights.norm().clamp(min=1e-30)
    return f" {(10 * sums).round().int().tolist()}"
