#!/usr/bin/env python3
"""Evaluate a running collaboration: download its state now and then, and compute the loss on validation data.

It joins as an observer, which slows nobody down: it offers no state, averages nothing, and need not be reachable.

    ./run_evaluator.py --run_id my-albert --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

The monitor logs and draws what it finds, too.
"""

from contextlib import ExitStack
from pathlib import Path

from arguments import BaseTrainingArguments, DatasetArguments, EvaluatorArguments, HyperparameterArguments
from lib.common.cli import parse_arguments
from lib.common.errors import run_script
from lib.common.processes import StopSignal, guard_children

ARGUMENTS = (EvaluatorArguments, BaseTrainingArguments, DatasetArguments, HyperparameterArguments)


def main() -> None:
    with StopSignal() as stop:
        args = parse_arguments(ARGUMENTS, __doc__)
        guard_children()
        evaluate(*args, stop)


def evaluate(
    evaluator_args: EvaluatorArguments,
    peer_args: BaseTrainingArguments,
    dataset_args: DatasetArguments,
    hyperparameters: HyperparameterArguments,
    stop: StopSignal,
) -> None:
    # Seconds of imports, which --help and a wrong flag need not wait for.
    from hivemind.utils import get_logger

    from lib.common.logs import setup_logging
    from lib.data.download import fetch_data
    from lib.data.loading import load_validation_data
    from lib.monitoring.evaluation import EvaluationLoop, Evaluator
    from lib.monitoring.trackers import make_reporters
    from lib.peer.lifecycle import open_peer, supervise
    from lib.training.model import build_model, get_objective, load_config, load_tokenizer
    from lib.training.observer import open_observer

    setup_logging(peer_args.debug)
    logger = get_logger(__name__)
    fetch_data(dataset_args, evaluator_args.disable_tqdm)
    tokenizer = load_tokenizer(dataset_args.tokenizer_path)
    config = load_config(dataset_args, tokenizer)
    dataset, collator = load_validation_data(dataset_args, evaluator_args.mlm_probability, tokenizer, config)
    model = build_model(config, peer_args.run_id)
    evaluator = Evaluator(dataset, collator, evaluator_args, stop.is_set)

    with ExitStack() as stack:
        peer = stack.enter_context(open_peer(peer_args, Path(evaluator_args.output_dir), client_mode=True, stop=stop))
        logger.info(f"This evaluator is {peer.dht.peer_id}")
        stack.enter_context(supervise({"DHT": peer.dht}, seconds=12.0, exit_code=0))
        averager = stack.enter_context(
            open_observer(model, peer, peer_args.run_id, hyperparameters, evaluator_args.load_state_timeout)
        )
        reporter = make_reporters(evaluator_args, peer_args.run_id)
        stack.callback(reporter.close)
        loop = EvaluationLoop(
            peer, peer_args.run_id, averager, model, get_objective(config), evaluator, reporter, evaluator_args
        )
        while not (stop.is_set() or loop.is_done):
            loop.refresh()
            stop.event.wait(evaluator_args.refresh_period)
    logger.info("The evaluator has stopped")


if __name__ == "__main__":
    run_script(main)
