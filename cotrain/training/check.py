"""`run_trainer.py --check`: try everything that a trainer needs, once, without training."""

import math
import os
import re
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from accelerate.utils import send_to_device
from hivemind.dht import DHT
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from cotrain.common.argument_parser import CommandLine
from cotrain.common.atomic_files import lock_folder
from cotrain.common.diagnosis import diagnose
from cotrain.common.errors import UserError, describe
from cotrain.common.signals import StopSignal
from cotrain.data.sampler import PeerSampler
from cotrain.dht.run_records import record_schemas
from cotrain.models.model import find_device
from cotrain.options import NOTHING, CollaborationOptions, LocalOptions, TrainerOptions
from cotrain.peer.addresses import peer_id_in
from cotrain.peer.peer import open_peer
from cotrain.peer.run_config import find_run_config
from cotrain.peer.tunnel import open_tunnel
from cotrain.status.short_steps import advise_target
from cotrain.training.builders import open_observer
from cotrain.training.hf_trainer import autocast_dtype, choose_devices
from cotrain.training.needs import Needs, has_own_memory, missing_copies, plan, set_batch_size
from cotrain.training.workload import Workload, load_workload
from peerstep.local_peer import LocalPeer
from peerstep.peer.processes import raise_file_limit
from peerstep.peer.redial import find_tcp_endpoint
from peerstep.reports.progress_report import read_progress
from peerstep.reports.records import get_records
from peerstep.step.pace import SHORT

PRECISION_ADVICE = {
    torch.float16: "it overflows in fp16. Pass --bf16, or --fp32 on a GPU without bf16",
    torch.bfloat16: "pass --fp32, or ask the organiser about the model",
    None: "check the data, or ask the organiser about the model",
}
REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
MUST_BE_EQUAL = "hivemind"  # peers of other versions may not understand each other; torch may fit the driver
OPTIONAL = {"wandb"}  # a trainer runs without
MIN_OPEN_FILES = 4096
DIAL_TIMEOUT = 5.0
DEVICE_SECONDS = 5.0  # for which micro-batches are computed
BATCH_SECONDS = 60.0  # for a micro-batch, at most
# Copies of the parameters in a trainer's processes, see docs/gpus.md#memory: peak PSS of two trainers and newcomers on
# CPUs, models of 9.3 and 30 M parameters. The rest is what a trainer of a tiny model takes.
COPIES, COPIES_OF_LOCAL_UPDATES, SHARED_COPIES, BASE_BYTES = 9, 12, 6, 1.0e9
# Copies of these (computed), without and with local updates, that are on a GPU: model, gradients, their sum or two
# moments. Beside one, the sums are copied through pinned memory.
COPIES_ON_GPU = 2, 4
# Time of a round, fitted by benchmarks/home_lines.py to ALBERT-large (17.85 M parameters), 2 and 4 peers, 5 to
# 20 Mbit/s and no latency. Residuals: at most 7 % for 22 of 24 points, 9 and 12 % for two.
FIXED_SECONDS = 0.2  # of a round, whatever the connection. The search for the group begins before the step is due
SLOWDOWN = 1.22  # seconds of a round / seconds for its tensors at full rate. Plain TCP has 1.14 in both directions
LINKS = 5, 14.7, 100  # Mbit/s of upload: a slow link, the median of the world's fixed lines, and a fast one
# Bits of a number, by compression. With topk, the mean of a contribution and of the average of 8 peers
BITS = {"none": 32, "float16": 16, "scaled_float16": 16, "blockwise8": 8.06, "blockwise4": 4.25, "topk": 0.65}


@dataclass(frozen=True)
class Finding:
    """Result of a check, with advice if something is wrong."""

    subject: str
    text: str
    advice: str = ""

    @property
    def line(self) -> str:
        mark = "FAILED" if self.advice else "ok"
        return f"{mark:<7} {self.subject}: {'. '.join(filter(None, (self.text, self.advice)))}"


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
    yield check_versions(REQUIREMENTS.read_text(encoding="utf-8"))
    yield check_open_files(raise_file_limit())
    yield attempt("folders", partial(check_folders, Path(args.training.output_dir)))
    yield from map(check_address, filter(find_tcp_endpoint, initial_peers))
    try:
        args = find_run_config(command_line, stop).to_options()
        peer_args = args.collaboration
        with open_tunnel(peer_args):  # a wrong token is found before anything is downloaded
            device = find_device(args.training.use_cpu)
            num_devices = choose_devices(args.training, args.dataset.lora_rank is not None)[1]
            if args.dataset.lora_rank is not None:  # before the weights of the base are downloaded
                set_batch_size(args, device)
                yield from check_memories(plan(args), device, num_devices)
            work = load_workload(args)
            size = work.num_parameters()
            text = f"{len(work.samples):,} samples; model of {size / 1e6:,.1f} million parameters"
            yield Finding("data and model", text)
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


def attempt(subject: str, check: Callable[[], str]) -> Finding:
    """Return the text that a check returns, or the error that it raises."""
    try:
        return Finding(subject, check())
    except Exception as error:
        return explain(subject, error)


def explain(subject: str, error: Exception) -> Finding:
    """Return an error, and what to do about it, which most errors say themselves."""
    row = diagnose(text := describe(error))
    if row is None:
        return Finding(subject, "", text)
    return Finding(subject, text, f"{row.action[0].upper()}{row.action[1:]}")


# On this machine


def check_versions(requirements: str) -> Finding:
    """Compare the installed packages with the pinned ones, in the text of requirements.txt."""
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", requirements, re.MULTILINE))
    found = dict.fromkeys(pinned)
    for name in pinned:
        with suppress(PackageNotFoundError):
            found[name] = version(name).partition("+")[0]
    left_out = {name for name in OPTIONAL if found.get(name) is None}
    wrong = [name for name in pinned if found[name] != pinned[name] and name not in left_out]
    text = ", ".join(f"{name} {found[name]} instead of {pinned[name]}" for name in wrong)
    is_fault = any(name == MUST_BE_EQUAL or found[name] is None for name in wrong)
    advice = "Run pip install -r requirements.txt" if is_fault else ""
    return Finding("versions", text or "those of requirements.txt", advice)


def check_open_files(limit: int) -> Finding:
    is_enough = limit >= MIN_OPEN_FILES or limit == resource.RLIM_INFINITY
    advice = f"Raise the hard limit to {MIN_OPEN_FILES}: as root with ulimit -Hn, or in the container's options"
    return Finding("open files", f"at most {limit}", "" if is_enough else advice)


def check_folders(output_dir: Path) -> str:
    """Lock the output folder, as a trainer does, and return where files are; UserError if it cannot be used."""
    with lock_folder(output_dir, "--output_dir") as fault:
        if fault:
            raise UserError(fault)
    return f"{output_dir}; temporary files in {tempfile.gettempdir()}; TMPDIR is {os.environ.get('TMPDIR', 'not set')}"


def check_memories(needs: Needs, device: torch.device, num_devices: int = 1) -> Iterator[Finding]:
    """Yield what memory is free and needed: of each GPU if there is one, of the machine, and shared memory."""
    on_gpu, local_updates = has_own_memory(device), needs.local_updates
    memory, bytes_per_copy = psutil.virtual_memory().available, 4.0 * needs.trained
    copies = (COPIES_OF_LOCAL_UPDATES if local_updates else COPIES) - on_gpu * COPIES_ON_GPU[local_updates]
    rest = 0.0 if on_gpu else needs.frozen + (needs.micro_batch - bytes_per_copy)
    needed = BASE_BYTES + copies * bytes_per_copy + rest
    rows = [("memory", memory, needed, "End other programs, or choose a machine with more memory")]
    advice = "End other programs on the GPU, choose one with more memory, or pass --use_cpu"
    for number in range(num_devices if on_gpu else 0):
        subject = f"GPU {number} memory" if num_devices > 1 else "GPU memory"
        with suppress(RuntimeError):  # not every kind tells
            free = torch.accelerator.get_memory_info(torch.device(device.type, number))[0]
            rows.append((subject, free, needs.on_gpu, advice))
    if os.path.isdir("/dev/shm"):
        free = psutil.disk_usage("/dev/shm").free
        rows.append(("/dev/shm", free, SHARED_COPIES * bytes_per_copy, "Enlarge it, in Docker with --shm-size"))
    for subject, free, needed, advice in rows:
        text = f"{free / 1e9:.1f} GB free, about {needed / 1e9:.1f} needed"
        yield Finding(subject, text + needs.text * (subject != "/dev/shm"), advice if free < needed else "")


class Deadline(TorchDispatchMode):
    """Ends a computation after BATCH_SECONDS or a signal, at any of its operations; the backward pass is one call."""

    def __init__(self, stop: StopSignal, task: str):
        super().__init__()
        self.stop, self.task, self.end = stop, task, time.monotonic() + BATCH_SECONDS

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.stop.is_set():
            raise SystemExit(0)
        if time.monotonic() > self.end:
            remedy = "choose a smaller model, a smaller --per_device_train_batch_size, or a GPU"
            raise UserError(f"{self.task} takes more than {BATCH_SECONDS:.0f} s: {remedy}")
        return function(*args, **(kwargs or {}))


def measure_device(work: Workload, args: LocalOptions, size: int, stop: StopSignal, sampler: PeerSampler) -> str:
    """Compute one micro-batch, then if it has the size of training some seconds of others, and return the speed.

    :raises UserError: if one takes too long; SystemExit after a signal
    """
    device, dtype, model = work.device, autocast_dtype(args), work.model.to(work.device).train()
    limit, task = DEVICE_SECONDS if size == args.per_device_train_batch_size else 0.0, f"a micro-batch of {size}"
    copies = missing_copies(model, args) if device.type != "cpu" else []
    started = time.monotonic()
    try:
        for number, batch in enumerate(DataLoader(work.samples, size, sampler=sampler, collate_fn=work.task.collate)):
            batch = send_to_device(batch, device)
            with Deadline(stop, f"{device}: {task}") if number == 0 and not args.torch_compile else nullcontext():
                with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                    loss = work.task.compute_loss(model, batch)
                loss.backward()
                model.zero_grad()
                if not math.isfinite(loss.item()):  # waits for the GPU
                    raise UserError(f"{device}: the loss of {task} is {loss.item()}: {PRECISION_ADVICE[dtype]}")
            if (seconds := time.monotonic() - started) >= limit:
                break
            if number == 0:
                started = time.monotonic()
        peak = torch.accelerator.max_memory_allocated(device) if device.type != "cpu" else 0
    finally:
        copies.clear()
        model.zero_grad()
        model.cpu()
    seconds /= max(1, number)
    hint = "; raise --per_device_train_batch_size" if device.type != "cpu" and seconds < 0.2 and size > 1 else ""
    used = f", {peak / 1e9:.1f} GB with all copies" if peak else ""
    return f"{device}: {task} takes {seconds:.2f} s, {size / seconds:.1f} samples/s{used}{hint}"


# The other peers


def check_address(maddr: str) -> Finding:
    """Try to open a TCP connection to an address."""
    try:
        socket.create_connection(find_tcp_endpoint(maddr), timeout=DIAL_TIMEOUT).close()
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(maddr, reason, "Ask for the current address; check that no firewall is in between")
    return Finding(maddr, "the port answers")


def check_peer(dht: DHT, peer_id: PeerID, client_mode: bool) -> str:
    """Ask a peer whether it answers and can dial this peer; UserError if not."""
    fault = dht.run_coroutine(partial(_ping, peer_id=peer_id), return_future=True).result(timeout=60.0)
    if fault is not None:
        raise UserError(fault)
    return f"it answers, {'this peer dials only (--client_mode)' if client_mode else 'it can dial this peer'}"


async def _ping(_dht: DHT, node: DHTNode, peer_id: PeerID) -> str | None:
    """Return what is wrong with a peer, if anything. Runs in the DHT process."""
    try:
        found = await node.protocol.call_ping(peer_id, validate=True)
    except Exception as error:
        return str(error)
    return None if found is not None else "it is no peer of this run: ask for the current address or an --invitation"


def measure_download(model: torch.nn.Module, peer: LocalPeer, args: TrainerOptions) -> str:
    """Download the state of the trainers, and return the speed."""
    timeout = args.collaboration.load_state_timeout
    with open_observer(model, peer, args.collaboration.run_id, args.training, timeout) as averager:
        received, started = psutil.net_io_counters().bytes_recv, time.monotonic()
        found = averager.download_state()
        seconds, received = time.monotonic() - started, psutil.net_io_counters().bytes_recv - received
    if found is None:
        return "no peer offers a trained state: this would be the first trainer"
    _, metadata, _ = found
    speed = f"{8e-6 * received / seconds:,.0f} Mbit/s"
    return f"step #{metadata['epoch']}, {received / 1e6:,.1f} MB in {seconds:.1f} s ({speed})"


def check_rounds(dht: DHT, num_parameters: int, args: CollaborationOptions) -> Finding:
    """Tell how long a round takes with an upload of --bandwidth, or of some links."""
    bits = BITS[args.gradient_compression] + BITS[args.state_compression]
    others = read_progress(get_records(dht, f"{args.run_id}_training_progress"))
    trainers = max(2, min(1 + len(others), args.target_group_size))
    peers = 2 if args.client_mode else trainers  # in client mode, it sends each tensor once, as one of two does
    uploads = [args.bandwidth] if args.bandwidth else LINKS
    seconds = [max(1.0, round_seconds(num_parameters, peers, bits, upload)) for upload in uploads]
    times = ", ".join(f"{needed:.0f} s at {upload:g}" for needed, upload in zip(seconds, uploads, strict=True))
    text = f"one of {trainers} trainers with the parameters takes about {times} Mbit/s of upload"
    rate = sum(other.samples_per_second for other in others.values())
    if rate > 0:
        gigabytes = hourly_gigabytes(num_parameters, peers, args, rate / args.target_batch_size)
        text += f"; about {gigabytes:.2g} GB of traffic an hour at the present speed of the run"
        usual = round_seconds(num_parameters, peers, BITS[args.gradient_compression], uploads[-1])
        share = usual * rate / args.target_batch_size
        text += f"; {advise_target(args.target_batch_size, share)}" if share > SHORT else ""
    if seconds[-1] <= args.averaging_timeout:
        return Finding("rounds", text)
    advice = "Use a faster connection, or ask the organiser for smaller rounds, see docs/tuning.md#local-updates"
    return Finding("rounds", f"{text}, and --averaging_timeout is {args.averaging_timeout:.0f} s", advice)


def hourly_gigabytes(elements: int, peers: int, args: CollaborationOptions, steps_per_second: float) -> float:
    """Return what a peer's rounds send and receive in an hour, see `round_seconds`; downloads of others come to it."""
    bits = BITS[args.gradient_compression] + BITS[args.state_compression] / args.average_state_every
    return 3600 * steps_per_second * 2 * 2 * (peers - 1) / peers * elements * bits / 8e9


def round_seconds(elements: int, peers: int, bits: float, upload: float) -> float:
    """Return the seconds from a due global step to the averages.

    In butterfly all-reduce each of N equal peers reduces one part of the tensors: it sends every other part to the
    peer that reduces that part, and the average of its part to all other peers: 2 (N-1)/N copies of the tensors.

    :param elements: parameters of the model
    :param bits: bits for each element: those of its gradient, and in rounds with parameters those of the parameter
    :param upload: Mbit/s of the slowest peer
    """
    return FIXED_SECONDS + SLOWDOWN * 2 * (peers - 1) / peers * elements * bits * 1e-6 / upload
