#!/usr/bin/env python3
"""Welcome trainers to a collaboration, watch its progress, and keep its checkpoints.

Run it on a machine that others can reach; it needs no GPU:

    ./run_training_monitor.py --run_config configs/run.yaml --host_maddrs /ip4/0.0.0.0/tcp/31337 --use_google_dns

It prints the --initial_peers with which trainers join, and tells them the settings of the run.
"""

from cotrain.common.errors import UserError, announce_imports, require_packages, run_script  # isort: skip
import logging
import os
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arguments import BaseTrainingArguments, ModelArguments, ProgressTrackerArguments, ReportingArguments
from cotrain.common.alerts import Alerts, announced_end
from cotrain.common.atomic_files import require_free
from cotrain.common.flags import HOST_PORT, ArgumentsError, flag, parse_repo_id, require
from cotrain.common.signals import StopSignal
from cotrain.options import Adopted
from cotrain.settings import Hyperparameters, StepSettings, check_compression

logger = logging.getLogger(__name__)


@dataclass
class TrainingMonitorArguments(ReportingArguments, group="Monitor"):
    """What the monitor watches, keeps and reports."""

    output_dir: str = flag("monitor_outputs", "Folder for metrics.jsonl, checkpoints and the identity")
    load_state_timeout: float = flag(600.0, "Give up on downloading the state from trainers after this many seconds")
    refresh_period: float = flag(30, "Seconds between two reads of the trainers' metrics")
    use_google_dns: bool = flag(
        False, "Look up this machine's public IP address at --public_ip_service, and announce it"
    )
    public_ip_service: str = flag("https://api.ipify.org", "Web service that returns the caller's IP address")
    store_checkpoints: bool = flag(True, "Regularly download the training state from trainers and save checkpoints")
    save_checkpoint_step_interval: int = flag(5, "Global steps between two checkpoints")
    save_total_limit: int = flag(2, "Keep this many checkpoints")
    hourly_checkpoints: int = flag(
        8, "Also keep the first checkpoint of each of this many hours, in case the newest are bad", at_least=0
    )
    space_id: str | None = flag(
        None,
        "Show the curves in public with trackio in this Hugging Face Space, which is created if it does not exist: "
        "NAME/SPACE; implies --report_to trackio. Needs a token that may write: `hf auth login` or HF_TOKEN",
    )
    serve_page: str | None = flag(
        None, "Serve the curves in public with trackio at this PORT or HOST:PORT of the machine, without an account"
    )
    sample_text: list[str] = flag(
        list,
        "Sentences with [MASK], or beginnings of texts for a causal model. The monitor logs "
        "how the model of each checkpoint completes them, and shows it in the dashboard",
    )
    repo_id: str | None = flag(
        None,
        "Upload the newest checkpoint, with a model card, to this repository on the Hugging Face Hub: "
        "NAME/MODEL. Needs a token that may write: `hf auth login` or HF_TOKEN",
    )
    upload_interval: float = flag(3600.0, "Seconds between two uploads", at_least=0)
    private_repo: bool = flag(False, "Make the repository private if it has to be created")
    upload_training_state: bool = flag(
        False, "Also upload the optimizer state, to resume the run from the Hub. Triples the size of an upload"
    )
    license: str | None = flag(None, "License for the model card, by its identifier on the Hub, e.g. apache-2.0")
    language: str | None = flag(None, "Language of the model for the model card, as an ISO 639-1 code, e.g. en")

    def __post_init__(self):
        super().__post_init__()
        if self.space_id is not None:
            self.space_id = parse_repo_id("--space_id", self.space_id.replace("/spaces/", "/"))
            self.require_trackio("space_id")
        if self.serve_page is not None:
            self.serve_page = self.serve_page if ":" in self.serve_page else f"0.0.0.0:{self.serve_page}"
            match = HOST_PORT.fullmatch(self.serve_page)
            is_valid = match is not None and match["port"] != "*" and 0 < int(match["port"]) < 65536
            require(is_valid, f"--serve_page must be PORT or HOST:PORT such as 7860, got '{self.serve_page}'")
            self.require_trackio("serve_page")
        if self.sample_text and not self.store_checkpoints:
            raise ArgumentsError("--sample_text needs the model of the checkpoints: drop --no_store_checkpoints")
        if self.repo_id is not None:
            self.repo_id = parse_repo_id("--repo_id", self.repo_id)
            if not self.store_checkpoints:
                raise ArgumentsError("--repo_id uploads checkpoints: drop --no_store_checkpoints")


@dataclass
class RunArguments(
    ModelArguments, Hyperparameters, StepSettings, ProgressTrackerArguments, group="Settings of the run"
):
    """Settings of the run. The monitor signs and publishes them; it uses some of them."""

    run_config: str | None = flag(
        None,
        "YAML file with flags of this script, such as configs/run.yaml. All settings of the run that are "
        "stated there or on the command line are signed and published: trainers need --initial_peers alone",
    )

    def __post_init__(self):
        super().__post_init__()
        check_compression(self.gradient_compression, self.local_updates)


ARGUMENTS = (TrainingMonitorArguments, RunArguments, BaseTrainingArguments)
# Flags that ask for what a monitor cannot do without the tokenizer
NEED_TOKENIZER = {"store_checkpoints", "tokenizer_path", "sample_text", "repo_id"}


def main() -> None:
    with StopSignal(grace=32.0) as stop:  # the last report takes 20 seconds of these at most
        from cotrain.common.argument_parser import ArgumentParser

        line = ArgumentParser(ARGUMENTS, __doc__).parse()
        require_packages(line.arguments)
        args, run_args, peer_args = line.arguments
        require_free(Path(args.output_dir), "--output_dir")
        if not peer_args.initial_peers:
            run_args.check_tokenizer(line.stated)
        announce_imports()
        from cotrain.peer.adoption import find_run_config

        entry = find_run_config(line, stop, is_monitor=True)
        args, run_args, _ = entry.arguments
        if run_args.lacks_tokenizer and line.stated.isdisjoint(NEED_TOKENIZER):
            args.store_checkpoints = False
            logger.warning(
                f"Keeping no checkpoints: there is no tokenizer in '{run_args.tokenizer_path}'. To keep them, pass "
                "--dataset_url, or copy that folder from the machine that ran tokenize_wikitext103.py"
            )
        peer_args = entry.arguments[-1]
        alerts = Alerts(peer_args.webhook_file, f"Monitor of run {peer_args.run_id}")
        with announced_end(alerts, stop.is_set):
            watch_run(entry, line.values, stop, alerts)


def watch_run(entry, stated: dict[str, object], stop: StopSignal, alerts: Alerts) -> None:
    """Run a monitor until it is stopped, or the run has ended.

    :param entry: see `find_run_config`
    :param stated: the flags of the command line, which are the settings of a new run
    """
    from cotrain.common.run_folder import claim_folder
    from cotrain.monitoring.contributors import Contributors
    from cotrain.monitoring.reporters import Reporters
    from cotrain.peer.addresses import announce_public_ip, log_visible_maddrs
    from cotrain.peer.peer import open_peer
    from cotrain.peer.relay import RunConfigRelay
    from cotrain.peer.tunnel import open_tunnel
    from peerstep.local_peer import supervise
    from utils import make_validators

    args, run_args, peer_args = entry.arguments
    run_id, output_dir = peer_args.run_id, Path(args.output_dir)
    with ExitStack() as stack:
        stack.enter_context(open_tunnel(peer_args))
        task, model = load_model(args, run_args, entry.adopted, run_id) if args.store_checkpoints else (None, None)
        card_metadata = check_accounts(args, task, run_id)
        if args.use_google_dns:
            announce_public_ip(peer_args, args.public_ip_service)

        # The peer that the others join through
        validators = make_validators(run_id)
        peer = stack.enter_context(open_peer(peer_args, validators, output_dir, False, stop, entry.is_alone))
        claim_folder(output_dir, run_id)
        longest_wait = 600.0 + 10 * args.refresh_period
        watchdog = stack.enter_context(supervise({"DHT": peer.dht}, 12.0, 0, longest_wait))

        # Reporting
        contributors = Contributors(output_dir, run_id)
        options = {"wandb_project": args.wandb_project, "space_id": args.space_id, "server_url": args.server_url}
        reporter = stack.enter_context(closing(Reporters(output_dir, run_id, args.report_to, **options)))
        uploader = open_uploader(stack, peer, card_metadata, contributors, args, peer_args)
        server = open_page_server(stack, peer, args, peer_args)

        # Checkpoints: downloaded from trainers, and offered to them
        keeper = None if task is None else open_keeper(stack, peer, task, model, reporter, args, run_args)

        # The settings of the run, before anybody knows the address
        relay = RunConfigRelay.of_monitor(peer, entry, stated, longest_wait)
        relay.publish(peer_args.page)
        log_visible_maddrs(peer.dht.get_visible_maddrs(), peer_args.use_ipfs, file=output_dir / "peer.json")

        monitor = build_monitor(peer, reporter, contributors, keeper, uploader, args, run_args, alerts)
        end_time = peer_args.end_time + 120.0  # trainers wait for the last checkpoint for 90 s
        while not (stop.is_set() or time.time() >= end_time or monitor.has_ended()):
            page = reporter.page if server is None else server.check()  # known after the start
            page = peer_args.page or page
            relay.publish(page)
            monitor.refresh(page)
            peer.dht.check_invitation()
            watchdog.record_work()
            stop.event.wait(args.refresh_period)
        monitor.finish()
    if uploader is not None and uploader.is_running:
        os._exit(0)  # Python would wait for the threads of huggingface_hub


def load_model(args: TrainingMonitorArguments, run_args: RunArguments, adopted: Adopted, run_id: str) -> tuple:
    """Return the task of the run and its model."""
    from cotrain.tasks.task_loading import build_initial_model, load_task

    # The weights of a base that adapters are trained for are needed for samples only.
    has_weights = run_args.lora_rank is not None and bool(args.sample_text)
    task = load_task(run_args, adopted, has_weights=has_weights)
    return task, build_initial_model(task, run_id)


def check_accounts(args: TrainingMonitorArguments, task, run_id: str):
    """Check that this machine may write to --space_id and --repo_id; return what the card of the latter says."""
    if args.space_id is None and args.repo_id is None:
        return None
    from cotrain.monitoring.hub_upload import check_repo, require_token
    from cotrain.monitoring.model_card import CardMetadata

    if args.space_id is not None:
        require_token("--space_id")
    if args.repo_id is None or task is None:
        return None
    metadata = CardMetadata(args.repo_id, run_id, task, args.license, args.language)
    check_repo(metadata, args.private_repo)
    return metadata


def open_uploader(stack: ExitStack, peer, metadata, contributors, args: TrainingMonitorArguments, peer_args):
    """Return the uploader to --repo_id, if there is one; the stack closes it."""
    if metadata is None:
        return None
    from cotrain.monitoring.hub_upload import HubUploader
    from cotrain.peer.addresses import choose_maddrs

    initial_peers = choose_maddrs(peer.dht.get_visible_maddrs(), peer_args.use_ipfs, least=3)
    options = Path(args.output_dir), args.upload_interval, args.private_repo, args.upload_training_state
    return stack.enter_context(closing(HubUploader(metadata, contributors, initial_peers, *options)))


def open_page_server(stack: ExitStack, peer, args: TrainingMonitorArguments, peer_args):
    """Return the server of --serve_page, if there is one; the stack ends it."""
    if args.serve_page is None:
        return None
    from cotrain.monitoring.page_server import PageServer, find_address

    if peer_args.page is None and (peer_args.tunnel != "none" or peer_args.announce_tunnel):
        raise UserError("--serve_page: the tunnel leads to the peer alone; pass the address of the page with --page")
    address = peer_args.page or find_address(args.serve_page, peer)
    return stack.enter_context(closing(PageServer(args.serve_page, address)))


def open_keeper(stack: ExitStack, peer, task, model, reporter, args: TrainingMonitorArguments, run_args: RunArguments):
    """Return the keeper of the checkpoints, which offers the newest one; the stack closes it."""
    from cotrain.monitoring.monitor import CheckpointKeeper
    from cotrain.monitoring.samples import open_completer, report_samples
    from cotrain.training.builders import open_observer

    folder, on_saved = Path(args.output_dir), bool  # a call that does nothing
    if args.sample_text:
        on_saved = partial(report_samples, open_completer(task, model, args.sample_text), args.sample_text, reporter)
    observer = open_observer(model, peer, peer.run_id, run_args, args.load_state_timeout, folder)
    averager, keep = stack.enter_context(observer), (args.save_total_limit, args.hourly_checkpoints)
    options = folder, args.save_checkpoint_step_interval, keep, args.refresh_period, on_saved
    keeper = stack.enter_context(closing(CheckpointKeeper(averager, task, model, peer.run_id, *options)))
    keeper.restore()
    return keeper


def build_monitor(peer, reporter, contributors, keeper, uploader, args: TrainingMonitorArguments, run_args, alerts):
    """Return the monitor, which reports each step that the trainers complete."""
    from cotrain.monitoring.advice import Adviser
    from cotrain.monitoring.aggregation import MetricsAggregator
    from cotrain.monitoring.monitor import TrainingMonitor

    aggregator = MetricsAggregator(
        reporter.last_step(),
        alive_timeout=min(60.0, run_args.metadata_expiration),
        settle_time=max(10.0, args.refresh_period),
        target_batch_size=run_args.target_batch_size,
        believes_weights=not peer.dht.is_open,
    )
    parts, adviser = (reporter, contributors, keeper, uploader), Adviser(run_args, run_args)
    periods = args.refresh_period, args.save_checkpoint_step_interval
    return TrainingMonitor(peer, aggregator, *parts, adviser, *periods, run_args.last_step, alerts)


if __name__ == "__main__":
    run_script(main)
