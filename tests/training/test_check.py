"""Tests of --check without peers."""

import math
import re
import socket
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hivemind.p2p import PeerID

from arguments import TRAINER_ARGUMENTS, CollaborationArguments, LocalTrainingArguments
from cotrain.common.argument_parser import ArgumentParser
from cotrain.common.errors import UserError
from cotrain.common.versions import read_requirements
from cotrain.training import check, check_machine, check_run
from cotrain.training.check_machine import (
    MIN_OPEN_FILES,
    check_memories,
    check_open_files,
    check_versions,
    measure_device,
)
from cotrain.training.check_run import check_address, check_rounds
from cotrain.training.finding import Finding, attempt
from cotrain.training.needs import Needs, missing_copies
from peerstep.peer import processes
from peerstep.peer.processes import ENOUGH_FILES, raise_file_limit
from peerstep.reports.progress_report import MAX_SAMPLES
from tests.support.dht_records import heartbeat

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ALBERT_LARGE = 17_847_000


def test_installed_versions():
    assert not check_versions(read_requirements()).advice
    other = check_versions("hivemind==0.9\nnumpy==1.0\n")
    assert re.match(r"FAILED  versions: hivemind [\d.]+ instead of 0.9, numpy .* instead of 1.0. Run pip", other.line)
    assert not check_versions("torch==0.1\n").advice, "it may fit the driver"
    assert "no-such-package (missing)" in check_versions("no-such-package==1.0\n").line
    assert check_versions("no-such-package==1.0\n").advice


class Samples(list):
    """Work of 16 samples, for a linear model that records the sizes of its batches."""

    def __init__(self):
        super().__init__(torch.ones(16, 2).unbind())
        self.samples, self.device, self.sizes = self, torch.device("cpu"), []
        self.model = torch.nn.Linear(2, 1)
        self.task = SimpleNamespace(collate=torch.stack, compute_loss=self.compute_loss)

    def compute_loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(batch))
        return model(batch).mean()


ARGS = LocalTrainingArguments(per_device_train_batch_size=4)
RUNNING = SimpleNamespace(is_set=lambda: False)


def test_device_computes_one_sample_and_then_micro_batches():
    work = Samples()
    assert re.fullmatch(
        r"cpu: a micro-batch of 1 takes [\d.]+ s, [\d.]+ samples/s", measure_device(work, ARGS, 1, RUNNING, range(16))
    )
    assert work.sizes == [1]
    assert "a micro-batch of 4 takes" in measure_device(work, ARGS, 4, RUNNING, range(16))
    assert work.sizes[0] == 1 and set(work.sizes[1:]) == {4}
    assert all(parameter.grad is None for parameter in work.model.parameters())


def test_micro_batch_that_takes_too_long_ends(monkeypatch):
    """Mamba without its kernels took minutes."""
    monkeypatch.setattr(check_machine, "BATCH_SECONDS", -1.0)
    finding = attempt("device", partial(measure_device, Samples(), ARGS, 4, RUNNING, range(16)))
    assert "a micro-batch of 4 takes more than -1 s: choose a smaller model" in finding.line and finding.advice


def test_signal_ends_a_micro_batch_at_each_operation():
    """Also in the backward pass, where Python handles no signal otherwise."""
    work, passes = Samples(), []
    work.model.register_full_backward_hook(lambda *_: passes.append("backward"))
    for operations in range(100):
        answers = [False] * operations + [True] * 1000
        stop = SimpleNamespace(is_set=iter(answers).__next__)
        try:
            attempt("device", partial(measure_device, work, LocalTrainingArguments(), 1, stop, range(16)))
        except SystemExit:
            passes.append("stopped")
        else:
            break
    assert passes.count("stopped") == operations > 5
    assert "stopped" in passes[passes.index("backward") :], "some after the backward pass began"
    work.model(torch.ones(1, 2))


def test_open_files():
    assert not check_open_files(MIN_OPEN_FILES).advice and not check_open_files(-1).advice
    assert "hard limit to 4096" in check_open_files(1024).advice


@pytest.mark.parametrize(
    ("limits", "raised"),
    [((1024, 1_000_000), (ENOUGH_FILES, 1_000_000)), ((1024, 4096), (4096, 4096)), ((1024, -1), (ENOUGH_FILES, -1))],
)
def test_scripts_raise_their_limit_on_open_files(monkeypatch, limits, raised):
    found = [limits]
    monkeypatch.setattr(processes.resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(processes.resource, "setrlimit", lambda _, new: found.append(new))
    assert raise_file_limit() == raised[0] and found[1:] == [raised]
    assert raise_file_limit() == raised[0] and found[1:] == [raised], "once is enough"
    found.append((-1, -1))
    assert raise_file_limit() == -1


def test_memory(monkeypatch):
    """Model and gradients of 350 million parameters are on the GPU, and not in the memory of a notebook."""
    monkeypatch.setattr(check_machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=13e9))
    monkeypatch.setattr(check_machine.psutil, "disk_usage", lambda _path: SimpleNamespace(free=9e9))
    monkeypatch.setattr(check_machine.torch.accelerator, "get_memory_info", lambda _device: (8e9, 16e9))
    monkeypatch.setattr(check_machine, "has_own_memory", lambda device: device.type == "cuda")

    def faults(num_parameters: int, device: str, local_updates: bool = False) -> list[str]:
        needs = Needs(num_parameters, 4.0 * num_parameters, local_updates)
        found = check_memories(needs, torch.device(device))
        return [finding.subject for finding in found if finding.advice]

    assert faults(350_000_000, "cpu") == ["memory"] and faults(280_000_000, "cpu") == []
    assert faults(280_000_000, "cpu", local_updates=True) == ["memory"]
    assert faults(350_000_000, "cuda") == []
    assert faults(350_000_000, "cuda", local_updates=True) == ["GPU memory"]
    assert faults(10**9, "cuda") == ["memory", "GPU memory", "/dev/shm"]
    *_, last = check_memories(Needs(10**9, 4e9), torch.device("cpu"))
    assert last.line.startswith("FAILED  /dev/shm: 9.0 GB free, about 24.0 needed. Enlarge it")


def test_memory_of_adapters(monkeypatch):
    """A base of 8 billion parameters, with adapters of 42 million: 16 bytes of each of those on the GPU."""
    monkeypatch.setattr(check_machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=13e9))
    monkeypatch.setattr(check_machine.torch.accelerator, "get_memory_info", lambda _device: (24e9, 24e9))
    monkeypatch.setattr(check_machine, "has_own_memory", lambda device: device.type == "cuda")
    needs = Needs(42_000_000, 4.2e9, frozen=16.1e9, text=": 16.1 for the base, and so on")
    machine, *_ = check_memories(needs, torch.device("cpu"))
    assert machine.line.startswith("FAILED  memory: 13.0 GB free, about 22.6 needed: 16.1 for the base")
    machine, gpu, shared = check_memories(needs, torch.device("cuda"))
    assert gpu.line.startswith("ok      GPU memory: 24.0 GB free, about 20.6 needed: 16.1 for")
    assert "about 2.2 needed" in machine.text and "base" not in shared.text
    first, second = [finding for finding in check_memories(needs, torch.device("cuda"), 2) if "GPU" in finding.subject]
    assert (first.subject, second.subject) == ("GPU 0 memory", "GPU 1 memory")


def test_memory_that_a_gpu_shares_with_the_machine_is_counted_once(monkeypatch):
    monkeypatch.setattr(check_machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=13e9))
    needs = Needs(42_000_000, 4.2e9, frozen=16.1e9)
    rows = {finding.subject: finding for finding in check_memories(needs, torch.device("mps"))}
    assert "GPU memory" not in rows and "about 22.6 needed" in rows["memory"].text


@pytest.mark.parametrize(
    ("local_updates", "accumulation", "number"), [(False, 1, 1), (True, 1, 2), (False, 2, 2), (True, 2, 3)]
)
def test_trial_has_all_copies_of_training(monkeypatch, local_updates, accumulation, number):
    """Sums and inner moments were missing: 1.4 and 2.8 GB of 350 million parameters."""
    args = LocalTrainingArguments(local_updates=local_updates, gradient_accumulation_steps=accumulation)
    copies = missing_copies(torch.nn.Linear(3, 2), args)
    assert sum(copy.numel() for copy in copies) == number * 8 and {copy.dtype for copy in copies} == {torch.float32}


def test_copies_are_alive_while_a_device_computes_the_trial(monkeypatch):
    work, alive = Samples(), []
    work.device, work.model.cpu = torch.device("meta"), lambda: None  # a stand-in, from which nothing can be copied
    monkeypatch.setattr(check_machine, "autocast_dtype", lambda args: None)
    monkeypatch.setattr(check_machine.torch, "autocast", lambda *_, **__: nullcontext())

    def keep(model: torch.nn.Module, args: LocalTrainingArguments) -> list[torch.Tensor]:
        copies = missing_copies(model, args)
        alive.extend(map(weakref.ref, copies))
        return copies

    def end(_model: torch.nn.Module, batch: torch.Tensor) -> None:
        raise UserError(f"{sum(kept().is_meta for kept in alive)} copies beside a batch on {batch.device}")

    monkeypatch.setattr(check_machine, "missing_copies", keep)
    work.task.compute_loss = end
    with pytest.raises(UserError, match="4 copies beside a batch on meta"):
        measure_device(work, ARGS, 4, RUNNING, range(16))


@pytest.mark.parametrize(("dtype", "advice"), [(torch.float16, "Pass --bf16"), (None, "check the data")])
def test_loss_that_is_not_finite_fails(monkeypatch, dtype, advice):
    samples = Samples()
    samples.task.compute_loss = lambda model, batch: model(batch).float().mean() * math.inf
    monkeypatch.setattr(check_machine, "autocast_dtype", lambda args: dtype)
    with pytest.raises(UserError, match=f"the loss of a micro-batch of 1 is -?(inf|nan).*{advice}"):
        measure_device(samples, ARGS, 1, RUNNING, range(16))


def test_addresses():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{PEER}"
        assert not check_address(address).advice
    refused = check_address(address)
    assert "Connection refused" in refused.text and refused.advice
    assert check_address(f"/dns4/no-such-host.invalid/tcp/1/p2p/{PEER}").advice


def test_report_counts_faults_and_says_what_to_do(monkeypatch, capsys):
    known, other = UserError("too many open files"), UserError("the invitation has expired; ask the organiser")
    findings = [Finding("a", "good"), attempt("b", lambda: "fine")]
    findings += [attempt("c", Mock(side_effect=known)), attempt("d", Mock(side_effect=other))]
    monkeypatch.setattr(check, "check_all", lambda *_args: iter(findings))
    assert check.check_trainer(None, None) == 1
    first, second, third, fourth, last = capsys.readouterr().out.splitlines()
    assert (first, second, last) == ("ok      a: good", "ok      b: fine", "2 of 4 checks failed: c, d")
    assert fourth == "FAILED  d: the invitation has expired; ask the organiser"
    assert third.startswith("FAILED  c: too many open files. ") and "ulimit -n 4096" in third
    del findings[2:]
    assert check.check_trainer(None, None) == 0
    assert "All checks passed" in capsys.readouterr().out


@pytest.fixture
def measure(monkeypatch):
    """Return a function that checks the time of a round, in a run with some trainers."""

    def measure(trainers: int = 7, others: Sequence[dict] = (), **options) -> str:
        values = [{}, None, *[heartbeat(1.0, 5)] * trainers, *others]  # malformed ones are no trainers
        records = {PeerID(bytes([index])): value for index, value in enumerate(values)}
        monkeypatch.setattr(check_run, "get_records", lambda _dht, key: {"run_training_progress": records}[key])
        args = CollaborationArguments(run_id="run", **{"averaging_timeout": 300.0, **options})
        return check_rounds(None, ALBERT_LARGE, args).line

    return measure


@pytest.mark.parametrize(
    ("options", "trainers", "seconds"),
    [
        ({}, 8, 122),  # docs/tuning.md
        ({"gradient_compression": "blockwise8"}, 8, 92),
        ({"client_mode": True}, 8, 70),
        ({"trainers": 0}, 2, 70),
        ({"target_group_size": 4}, 4, 105),
    ],
)
def test_round_at_the_bandwidth(measure, options, trainers, seconds):
    line = measure(bandwidth=10.0, **options)
    text = f"rounds: one of {trainers} trainers with the parameters takes about {seconds} s at 10 Mbit/s of upload"
    assert line.partition(";")[0] == f"ok      {text}"
    line = measure(bandwidth=10.0, **options, averaging_timeout=seconds - 1.0)
    assert line.startswith(f"FAILED  {text}") and f", and --averaging_timeout is {seconds - 1} s. Use a faster" in line


def test_check_tells_the_traffic_of_an_hour(measure):
    """Seven other trainers of ALBERT-large with 2.5 samples a second each: 15 steps an hour."""
    copies = 2 * 2 * 7 / 8  # sent and received, of a tensor by one of eight
    gigabytes = 7 * 2.5 / 4096 * 3600 * copies * ALBERT_LARGE * (16 + 16 / 8) / 8e9
    assert f"; about {gigabytes:,.1f} GB of traffic an hour at the present speed" in measure()
    assert "traffic" not in measure(trainers=0)


def test_check_believes_no_trainer_about_the_speed_of_the_run(measure):
    """A paused trainer is not waited for, and a false rate counts for a few times as many samples as the others'."""
    assert measure(others=[heartbeat(1.0, 5, away=True, samples_per_second=MAX_SAMPLES)]) == measure()
    traffic = []
    for rate in (2.5, float(MAX_SAMPLES)):
        line = measure(6, [heartbeat(1.0, 5, samples_per_second=rate)])
        traffic.append(float(re.search(r"about ([\d.e+]+) GB of traffic", line)[1]))
    assert traffic[1] < 2 * traffic[0]


def test_check_names_the_target_for_which_rounds_are_short(measure):
    """17.5 samples a second: a step of 4,096 takes 234 s, and a round at 100 Mbit/s 9 s."""
    assert "a round takes" not in measure(bandwidth=100.0)
    line = measure(bandwidth=14.7)
    assert line.startswith("ok") and "; a round takes 18% of a step" in line and "--target_batch_size 14590 " in line


def test_round_at_some_links(measure):
    expected = "takes about 244 s at 5, 83 s at 14.7, 12 s at 100 Mbit/s of upload"
    assert expected in measure(averaging_timeout=20.0)
    assert measure(averaging_timeout=10.0).startswith("FAILED")


def test_check_of_a_machine_alone_names_what_is_missing(tmp_path, monkeypatch):
    """It named the folder of the tokenizer, which a volunteer does not have to know."""
    monkeypatch.chdir(tmp_path)
    *others, last = check.check_all(ArgumentParser(TRAINER_ARGUMENTS, "").parse(["--output_dir", "out"]), None)
    assert {"versions", "folders"} < {finding.subject for finding in others}
    assert last.line.startswith("FAILED  joining: --initial_peers is missing: pass the address ")
