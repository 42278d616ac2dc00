"""`run_trainer.py --check`: try everything that a trainer needs, once, without training."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cotrain.common.argument_parser import CommandLine
from cotrain.common.errors import UserError
from cotrain.common.signals import StopSignal
from cotrain.common.versions import read_requirements
from cotrain.data.own_samples import OwnSamples
from cotrain.data.sampler import PeerSampler
from cotrain.dht.run_records import record_schemas
from cotrain.models.device import find_device
from cotrain.options import NOTHING, TrainerOptions
from cotrain.peer.addresses import peer_id_in
from cotrain.peer.adoption import find_run_config
from cotrain.peer.peer import open_peer
from cotrain.peer.tunnel import open_tunnel
from cotrain.training.check_machine import (
    check_folders,
    check_memories,
    check_open_files,
    check_versions,
    measure_device,
)
from cotrain.training.check_run import check_address, check_peer, check_rounds, measure_download
from cotrain.training.finding import Finding, attempt, explain
from cotrain.training.hf_trainer import choose_devices
from cotrain.training.needs import Needs, plan, set_batch_size
from cotrain.training.start import require_run
from cotrain.training.workload import load_workload
from peerstep.peer.processes import raise_file_limit
from peerstep.peer.redial import find_tcp_endpoint


def check_trainer(command_line: CommandLine, stop: StopSignal) -> int:
    """Do what a trainer does until its first local step, print what was found, and return the exit code."""
    findings = []
    for finding in check_all(command_line, stop):
        findings.append(finding)
        print(finding.line, flush=True)
    faults = [finding.subject for finding in findings if finding.advice]
    verdict = f"{len(faults)} of {len(findings)} checks failed: {', '.join(faults)}"
    print(verdict if faults else "All checks passed: this peer can train")
    return 1 if faults else 0


def check_all(command_line: CommandLine, stop: StopSignal) -> Iterator[Finding]:
    """Yield each finding as soon as it is there."""
    args = TrainerOptions._make((*command_line.arguments, NOTHING))
    initial_peers = args.collaboration.initial_peers
    yield check_versions(read_requirements())
    yield check_open_files(raise_file_limit())
    yield attempt("folders", partial(check_folders, Path(args.training.output_dir)))
    yield from map(check_address, filter(find_tcp_endpoint, initial_peers))
    try:
        args = find_run_config(command_line, stop).to_options()
        peer_args = args.collaboration
        with open_tunnel(peer_args):  # a wrong token is found before anything is downloaded
            require_run(command_line, args)
            device = find_device(args.training.use_cpu)
            num_devices = choose_devices(args.training, args.dataset.lora_rank is not None)[1]
            if args.dataset.lora_rank is not None:  # before the weights of the base are downloaded
                set_batch_size(args, device)
                yield from check_memories(plan(args), device, num_devices)
            work = load_workload(args)
            size = work.num_parameters()
            text = f"{len(work.samples):,} samples; model of {size / 1e6:,.1f} million parameters"
            yield Finding("data and model", text)
            if isinstance(work.samples, OwnSamples):
                steps, most = args.training.total_steps, args.training.total_steps * peer_args.target_batch_size
                yield Finding("own data", f"{work.samples.describe(most)} in {steps:,} steps if nobody else trains")
            if args.dataset.lora_rank is None:
                of_task = Needs(size, 4.0 * size, args.training.local_updates)
                needs = plan(args) if args.dataset.task is None else of_task
                yield from check_memories(needs, device, num_devices)
            schemas, folder = record_schemas(peer_args.run_id), Path(args.training.output_dir)
            with open_peer(peer_args, schemas, folder, peer_args.client_mode, stop) as peer:
                yield Finding("joining", f"this peer is in run {peer_args.run_id}")
                for peer_id in map(peer_id_in, initial_peers):
                    yield attempt(str(peer_id), partial(check_peer, peer.dht, peer_id, peer_args.client_mode))
                path, peer_id = Path(args.training.output_dir, "samples.json"), str(peer.dht.peer_id)
                sampler = PeerSampler(work.samples, peer_id, args.training.seed, path=path, should_stop=stop.is_set)
                sampler.file = None  # the samples of these checks are not used up
                for size in sorted({1, args.training.per_device_train_batch_size}):
                    measure = partial(measure_device, work, args.training, size, stop, sampler)
                    yield (finding := attempt("device", measure))
                    if finding.advice:
                        break
                if sampler.cache is not None:
                    yield Finding("shards", sampler.cache.describe())
                yield attempt("state", partial(measure_download, work.model, peer, args))
                yield check_rounds(peer.dht, work.num_parameters(only_trainable=True), peer_args)
    except UserError as error:
        yield explain("joining", error)
