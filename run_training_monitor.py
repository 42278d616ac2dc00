#!/usr/bin/env python3
"""Welcome trainers to a collaboration, watch its progress, and keep its checkpoints.

Run it on a machine that others can reach; it needs no GPU:

    ./run_training_monitor.py --run_id my-albert --host_maddrs /ip4/0.0.0.0/tcp/31337 --use_google_dns

It prints the --initial_peers with which trainers join.
"""

from contextlib import ExitStack
from pathlib import Path

from arguments import (
    AveragerArguments,
    BaseTrainingArguments,
    HyperparameterArguments,
    ModelArguments,
    OptimizerArguments,
    ProgressTrackerArguments,
    TrainingMonitorArguments,
)
from lib.common.cli import parse_arguments
from lib.common.errors import UserError, run_script
from lib.common.json_file import write_json
from lib.common.processes import StopSignal, guard_children

ARGUMENTS = (
    TrainingMonitorArguments,
    BaseTrainingArguments,
    ModelArguments,
    HyperparameterArguments,
    OptimizerArguments,
    AveragerArguments,
    ProgressTrackerArguments,
)


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
    optimizer_args: OptimizerArguments,
    averager_args: AveragerArguments,
    tracker_args: ProgressTrackerArguments,
    stop: StopSignal,
) -> None:
    # Seconds of imports, which --help and a wrong flag need not wait for.
    from hivemind.utils import get_logger

    from lib.common.logs import setup_logging
    from lib.monitoring.aggregation import MetricsAggregator
    from lib.monitoring.auxiliary_peer import open_auxiliary_peer
    from lib.monitoring.contributors import Contributors
    from lib.monitoring.hub_upload import HubUploader, check_repo, make_facts
    from lib.monitoring.monitor import TrainingMonitor, open_keeper
    from lib.monitoring.trackers import make_reporters
    from lib.peer.addresses import (
        announce_public_ip,
        choose_internet_maddrs,
        choose_maddrs,
        log_visible_maddrs,
    )
    from lib.peer.lifecycle import open_peer, supervise
    from lib.training.model import build_model, load_config, load_tokenizer

    setup_logging(peer_args.debug)
    logger = get_logger(__name__)
    if optimizer_args.client_mode:
        raise UserError("--client_mode: a monitor is there to be joined, so others must reach it; drop the flag")
    assists = monitor_args.assist_in_averaging
    if assists and peer_args.invitation is not None and monitor_args.assistant_invitation is None:
        raise UserError("--assist_in_averaging: the assistant is another peer, pass its --assistant_invitation, too")
    output_dir, run_id = Path(monitor_args.output_dir), peer_args.run_id
    if monitor_args.store_checkpoints or monitor_args.assist_in_averaging:
        tokenizer = load_tokenizer(model_args.tokenizer_path)
        config = load_config(model_args, tokenizer)
    if monitor_args.store_checkpoints:
        model = build_model(config, run_id)
    if monitor_args.repo_id is not None:
        facts = make_facts(monitor_args, run_id, model.config)
        check_repo(monitor_args, facts)
    if monitor_args.use_google_dns:
        announce_public_ip(peer_args, monitor_args.public_ip_service)

    with ExitStack() as stack:
        peer = stack.enter_context(
            open_peer(peer_args, output_dir, client_mode=False, stop=stop, may_start_alone=True)
        )
        stack.enter_context(supervise({"DHT": peer.dht}, seconds=12.0, exit_code=0))
        keeper = uploader = None
        if monitor_args.store_checkpoints:
            keeper = stack.enter_context(
                open_keeper(
                    peer, run_id, model, tokenizer, hyperparameters, monitor_args, optimizer_args.load_state_timeout
                )
            )
        if monitor_args.assist_in_averaging:
            stack.enter_context(
                open_auxiliary_peer(
                    build_model(config, run_id), peer, monitor_args, peer_args, hyperparameters, optimizer_args,
                    averager_args, tracker_args, stop,
                )
            )  # fmt: skip
        visible_maddrs = peer.dht.get_visible_maddrs()
        log_visible_maddrs(visible_maddrs, only_p2p=peer_args.use_ipfs)
        # For programs, such as run_local_demo.py; people read the log.
        write_json(output_dir / "peer.json", {"initial_peers": choose_maddrs(visible_maddrs, peer_args.use_ipfs)})

        contributors = Contributors(output_dir, run_id)
        if monitor_args.repo_id is not None:
            initial_peers = choose_internet_maddrs(visible_maddrs, only_p2p=peer_args.use_ipfs)
            uploader = HubUploader(monitor_args, facts, contributors, initial_peers)
            stack.callback(uploader.close)
        reporter = make_reporters(monitor_args, run_id)
        stack.callback(reporter.close)
        aggregator = MetricsAggregator(
            reporter.last_step(),
            alive_timeout=tracker_args.metadata_expiration,
            settle_time=max(10.0, monitor_args.refresh_period),
        )
        training_monitor = TrainingMonitor(
            peer, run_id, aggregator, reporter, contributors, keeper, uploader, monitor_args
        )
        while not stop.is_set():
            training_monitor.refresh()
            stop.event.wait(monitor_args.refresh_period)
        training_monitor.flush()
    logger.info("The monitor has stopped")


if __name__ == "__main__":
    run_script(main)
