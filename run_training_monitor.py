#!/usr/bin/env python3
"""Welcome trainers to a collaboration, watch its progress, and keep its checkpoints.

Run it on a machine that others can reach; it needs no GPU:

    ./run_training_monitor.py --run_id my-albert --host_maddrs /ip4/0.0.0.0/tcp/31337 --use_google_dns

It prints the --initial_peers with which trainers join.
"""

from contextlib import ExitStack
from pathlib import Path

from arguments import (
    BaseTrainingArguments,
    HyperparameterArguments,
    ModelArguments,
    TrainingMonitorArguments,
    parse_arguments,
)
from errors import run_script
from processes import StopSignal, Watchdog, exit_after, guard_children

ARGUMENTS = (TrainingMonitorArguments, BaseTrainingArguments, ModelArguments, HyperparameterArguments)


def main() -> None:
    with StopSignal() as stop:
        args = parse_arguments(ARGUMENTS, __doc__)
        guard_children()
        monitor(*args, stop)


def monitor(
    monitor_args: TrainingMonitorArguments,
    peer_args: BaseTrainingArguments,
    model_args: ModelArguments,
    hyperparameters: HyperparameterArguments,
    stop: StopSignal,
) -> None:
    # Seconds of imports, which --help and a wrong flag need not wait for.
    from atomic import remove_leftovers
    from checkpoints import lock_folder
    from metrics import MetricsAggregator
    from model import build_model, load_config, load_tokenizer
    from monitor import CheckpointKeeper, TrainingMonitor
    from optimizer import build_state_averager
    from reporting import make_reporters
    from utils import announce_public_ip, log_visible_maddrs, logger, setup_logging, start_peer

    setup_logging(peer_args.debug)
    output_dir = Path(monitor_args.output_dir)
    if monitor_args.store_checkpoints:
        tokenizer = load_tokenizer(model_args.tokenizer_path)
        model = build_model(load_config(model_args, tokenizer), peer_args.run_id)
    if monitor_args.use_google_dns:
        announce_public_ip(peer_args, monitor_args.public_ip_service)

    with ExitStack() as stack:
        stack.enter_context(lock_folder(output_dir, "--output_dir"))
        remove_leftovers(output_dir)
        stop.defer()
        identity_path = Path(peer_args.identity_path or output_dir / "identity.key")
        peer = start_peer(peer_args, identity_path, client_mode=False, should_stop=stop.event)
        stack.callback(peer.dht.shutdown)
        keeper, children = None, {"DHT": peer.dht}
        if monitor_args.store_checkpoints:
            averager = build_state_averager(
                model, peer, peer_args.run_id, hyperparameters, monitor_args.load_state_timeout
            )
            stack.callback(averager.shutdown)
            children["averager"] = averager
            keeper = CheckpointKeeper(averager, model, tokenizer, peer_args.run_id, monitor_args)
            stack.callback(keeper.close)
            keeper.restore()
        stack.callback(exit_after, 12.0, 0, "hivemind does not shut down")  # last resort, armed before the above
        watchdog = Watchdog(children)
        watchdog.start()
        stack.callback(watchdog.stop)
        log_visible_maddrs(peer.dht.get_visible_maddrs(), only_p2p=peer_args.use_ipfs)

        reporter = make_reporters(monitor_args, peer_args.run_id)
        stack.callback(reporter.close)
        aggregator = MetricsAggregator(reporter.last_step(), settle_time=max(10.0, monitor_args.refresh_period))
        training_monitor = TrainingMonitor(peer, peer_args.run_id, aggregator, reporter, keeper, monitor_args)
        while not stop.is_set():
            training_monitor.refresh()
            stop.event.wait(monitor_args.refresh_period)
        training_monitor.flush()
    logger.info("The monitor has stopped")


if __name__ == "__main__":
    run_script(main)
