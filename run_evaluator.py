#!/usr/bin/env python3
"""Evaluate a running collaboration: download its state periodically, and compute the metrics on validation data.

It joins as a read-only observer and does not slow down training: it offers no state, averages nothing, and need not be
reachable.

    ./run_evaluator.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

The results go to the log, to evaluations.jsonl and, with --report_to, to a dashboard. The model with the lowest
validation loss is kept in a folder `best`.
"""

from cotrain.common.errors import UserError, announce_imports, run_script  # isort: skip
import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from arguments import BaseTrainingArguments, DatasetArguments, ReportingArguments
from cotrain.common.atomic_files import require_free
from cotrain.common.flags import flag
from cotrain.common.signals import StopSignal
from cotrain.settings import Hyperparameters


@dataclass
class EvaluatorArguments(ReportingArguments, group="Evaluation"):
    """What the evaluator computes, and when."""

    output_dir: str = flag("evaluator_outputs", "Folder for evaluations.jsonl, the best model and the identity")
    evaluation_interval: float = flag(300.0, "Evaluate every this many seconds, if there is a new global step")
    evaluation_steps: int | None = flag(
        None, "Evaluate every this many global steps instead of every --evaluation_interval seconds"
    )
    per_device_eval_batch_size: int | None = flag(
        None, "Samples per batch in the evaluation. Default: at most 16, with logits of at most 1 GB"
    )
    max_eval_samples: int | None = flag(None, "Evaluate this many samples of the split 'validation'. Default: all")
    use_cpu: bool = flag(False, "Do not use a GPU")
    refresh_period: float = flag(10, "Seconds between two reads of the trainers' metrics")
    load_state_timeout: float = flag(600.0, "Give up on downloading the state from trainers after this many seconds")
    max_global_steps: int | None = flag(
        None, "Exit once this global step or a later one is evaluated. Default: the last one of the schedule"
    )
    patience: int = flag(3, "Warn if the validation loss has not fallen for this many evaluations")
    disable_tqdm: bool = flag(False, "Show no progress bar")


ARGUMENTS = (EvaluatorArguments, BaseTrainingArguments, DatasetArguments, Hyperparameters)


def main() -> None:
    with StopSignal() as stop:
        from cotrain.common.argument_parser import ArgumentParser

        line = ArgumentParser(ARGUMENTS, __doc__).parse()
        if not line.arguments[1].initial_peers:
            raise UserError("--initial_peers is missing: pass the address of a peer of the run")
        require_free(Path(line.arguments[0].output_dir), "--output_dir")
        announce_imports()
        from cotrain.peer.adoption import find_run_config

        evaluate(find_run_config(line, stop), stop)


def evaluate(entry, stop: StopSignal) -> None:
    """Evaluate the run until the evaluator is stopped, or the run has ended.

    :param entry: see `find_run_config`
    """
    from hivemind.utils import get_logger

    from cotrain.common.run_folder import claim_folder
    from cotrain.monitoring.evaluation import BEST_FOLDER, BestModel, EvaluationLoop, Evaluator, Schedule
    from cotrain.monitoring.reporters import Reporters
    from cotrain.peer.peer import open_peer
    from cotrain.tasks.task_loading import build_initial_model, load_task
    from cotrain.training.builders import open_observer
    from peerstep.local_peer import supervise
    from utils import make_validators

    args, peer_args, dataset_args, hyperparameters = entry.arguments
    logger, run_id, output_dir = get_logger(__name__), peer_args.run_id, Path(args.output_dir)
    task = load_task(dataset_args, entry.adopted, has_weights=True, disable_tqdm=args.disable_tqdm)
    options = args.max_eval_samples, args.per_device_eval_batch_size, args.use_cpu, args.disable_tqdm
    evaluator = Evaluator(task, stop.is_set, *options)
    model = build_initial_model(task, run_id)
    with ExitStack() as stack:
        # The peer
        peer = stack.enter_context(open_peer(peer_args, make_validators(run_id), output_dir, True, stop))
        claim_folder(output_dir, run_id)
        logger.info(f"This evaluator is {peer.dht.peer_id}")
        # One evaluation may take hours.
        watchdog = stack.enter_context(supervise({"DHT": peer.dht}, 12.0, 0, longest_wait=86_400.0))

        # Downloads of the state, and reports
        observer = open_observer(model, peer, run_id, hyperparameters, args.load_state_timeout)
        options = {"wandb_project": args.wandb_project, "server_url": args.server_url}
        reporter = Reporters(output_dir, run_id, args.report_to, **options)
        stack.callback(reporter.close)
        averager, best = stack.enter_context(observer), BestModel(output_dir / BEST_FOLDER, args.patience)
        last_step = min(args.max_global_steps or math.inf, hyperparameters.last_step or math.inf)
        schedule = Schedule(args.evaluation_interval, args.evaluation_steps, last_step)
        loop = EvaluationLoop(peer, averager, model, evaluator, reporter, best, schedule, args.refresh_period)

        if evaluator.device.type != "cpu":
            evaluator.try_batch(model)
        if dataset_args.from_pretrained:
            loop.evaluate_base()
        while not (stop.is_set() or loop.is_done):
            loop.refresh()
            peer.dht.check_invitation()
            watchdog.record_work()
            stop.event.wait(args.refresh_period)
    logger.info("The evaluator has stopped")


if __name__ == "__main__":
    run_script(main)
