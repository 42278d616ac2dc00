#!/usr/bin/env python3
"""Welcome trainers to a collaboration, watch its progress, and keep its checkpoints.

Run it on a machine that others can reach; it needs no GPU:

    ./run_training_monitor.py --run_config configs/run.yaml --host_maddrs /ip4/0.0.0.0/tcp/31337 --use_google_dns

It prints the --initial_peers with which trainers join, and tells them the settings of the run.
"""

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arguments import BaseTrainingArguments, ModelArguments, ProgressTrackerArguments, ReportingArguments
from cotrain.common.errors import run_script
from cotrain.common.flags import ArgumentsError, flag, parse_repo_id
from cotrain.common.json_file import write_json
from cotrain.common.signals import StopSignal
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
            if self.report_to not in ("none", "trackio"):
                raise ArgumentsError(f"--space_id needs trackio: drop --report_to {self.report_to}")
            self.report_to = "trackio"
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
    with StopSignal(grace=32.0) as stop, ExitStack() as stack:  # the last report takes 20 seconds of these at most
        from cotrain.common.argument_parser import ArgumentParser

        line = ArgumentParser(ARGUMENTS, __doc__).parse()
        # These imports take seconds, which --help and usage errors do not need.
        from cotrain.common.run_folder import claim_folder
        from cotrain.monitoring.advice import Adviser
        from cotrain.monitoring.aggregation import MetricsAggregator
        from cotrain.monitoring.contributors import Contributors
        from cotrain.monitoring.hub_upload import HubUploader, check_repo, require_token
        from cotrain.monitoring.model_card import CardMetadata
        from cotrain.monitoring.monitor import CheckpointKeeper, TrainingMonitor
        from cotrain.monitoring.reporters import Reporters
        from cotrain.monitoring.samples import open_completer, report_samples
        from cotrain.peer import addresses
        from cotrain.peer.peer import open_peer
        from cotrain.peer.run_config import RunConfig, RunConfigRelay, find_run_config
        from cotrain.peer.tunnel import open_tunnel
        from cotrain.tasks.task_loading import build_initial_model, load_task
        from cotrain.training.builders import open_observer
        from peerstep.swarm import supervise
        from utils import make_validators

        entry = find_run_config(line, stop, is_monitor=True)
        args, run_args, peer_args = entry.arguments
        if run_args.lacks_tokenizer and line.stated.isdisjoint(NEED_TOKENIZER):
            args.store_checkpoints = False
            logger.warning(
                f"Keeping no checkpoints: there is no tokenizer in '{run_args.tokenizer_path}'. To keep them, pass "
                "--dataset_url, or copy that folder from the machine that ran tokenize_wikitext103.py"
            )
        output_dir, run_id = Path(args.output_dir), peer_args.run_id
        stated = {**line.values, **({} if run_args.task is None else {"task_sha256": run_args.task_sha256})}
        stack.enter_context(open_tunnel(peer_args))
        if args.store_checkpoints:
            # The weights of a base that adapters are trained for are needed for samples only.
            task = load_task(
                run_args, entry.adopted, has_weights=run_args.lora_rank is not None and bool(args.sample_text)
            )
            model = build_initial_model(task, run_id)
            if run_args.lora_rank is not None:
                stated["model_revision"] = run_args.model_revision
        if args.sample_text:
            completer = open_completer(task, model, args.sample_text)
        if args.repo_id is not None:
            card_metadata = CardMetadata(args.repo_id, run_id, task, args.license, args.language)
            check_repo(card_metadata, args.private_repo)
        if args.space_id is not None:
            require_token("--space_id")
        if args.use_google_dns:
            addresses.announce_public_ip(peer_args, args.public_ip_service)

        # The peer that the others join through
        peer = stack.enter_context(
            open_peer(peer_args, make_validators(peer_args.run_id), output_dir, False, stop, entry.is_alone)
        )
        claim_folder(output_dir, run_id)
        longest_wait = 600.0 + 10 * args.refresh_period
        watchdog = stack.enter_context(supervise({"DHT": peer.dht}, 12.0, 0, longest_wait))
        visible_maddrs = peer.dht.get_visible_maddrs()

        # Checkpoints: downloaded from trainers, and offered to them
        keeper = uploader = None
        if args.store_checkpoints:
            observer = open_observer(model, peer, run_id, run_args, args.load_state_timeout, output_dir)
            keeper = CheckpointKeeper(stack.enter_context(observer), task, model, run_id, args)
            stack.callback(keeper.close)
            keeper.restore()

        own = RunConfig.sign({"run_id": run_id, **stated}, peer.private_key) if entry.is_organiser else None
        relay = RunConfigRelay(peer, own or entry.config, longest_wait)
        relay.publish()  # before anybody knows the address
        addresses.log_visible_maddrs(visible_maddrs, only_p2p=peer_args.use_ipfs)
        # For programs, such as run_local_demo.py; people read the log.
        write_json(
            output_dir / "peer.json", {"initial_peers": addresses.choose_maddrs(visible_maddrs, peer_args.use_ipfs)}
        )

        # Reporting
        contributors = Contributors(output_dir, run_id)
        if args.repo_id is not None:
            initial_peers = addresses.choose_maddrs(visible_maddrs, peer_args.use_ipfs, least=3)
            uploader = HubUploader(card_metadata, contributors, initial_peers, args)
            stack.callback(uploader.close)
        reporter = Reporters(
            output_dir, run_id, args.report_to, wandb_project=args.wandb_project, space_id=args.space_id
        )
        stack.callback(reporter.close)
        if args.sample_text:
            keeper.on_saved = partial(report_samples, completer, args.sample_text, reporter)
        aggregator = MetricsAggregator(
            reporter.last_step(),
            alive_timeout=min(60.0, run_args.metadata_expiration),
            settle_time=max(10.0, args.refresh_period),
            target_batch_size=run_args.target_batch_size,
            believes_weights=not peer.dht.is_open,
        )
        adviser = Adviser(run_args)
        training_monitor = TrainingMonitor(
            peer, run_id, aggregator, reporter, contributors, keeper, uploader, args, adviser, run_args.last_step
        )
        end_time = peer_args.end_time + 120.0  # trainers wait for the last checkpoint for 90 s
        while not (stop.is_set() or time.time() >= end_time or training_monitor.has_ended()):
            page = peer_args.page or reporter.page  # wandb's is known after its start
            if entry.is_organiser and relay.config.settings.get("page") != page:
                relay.config = RunConfig.sign({**relay.config.settings, "page": page}, peer.private_key)
            relay.publish()
            training_monitor.refresh(page)
            peer.dht.check_invitation()
            watchdog.record_work()
            stop.event.wait(args.refresh_period)
        training_monitor.finish()
    if uploader is not None and uploader.is_running:
        os._exit(0)  # Python would wait for the threads of huggingface_hub


if __name__ == "__main__":
    run_script(main)
