"""Tests of --check without peers."""

import re
import socket
from types import SimpleNamespace

import pytest
import torch
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.timed_storage import ValueWithExpiration

from arguments import CollaborationArguments
from lib.averaging.progress import PeerProgress
from lib.common.errors import UserError
from lib.peer.upload import Upload
from lib.training import check
from lib.training.check import (
    MIN_OPEN_FILES,
    REQUIREMENTS,
    Finding,
    Report,
    check_address,
    check_memories,
    check_open_files,
    check_upload,
    check_versions,
    compare_memory,
    describe_upload,
)
from tests.support.fakes import FakeUploads

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_installed_versions():
    assert not check_versions(REQUIREMENTS.read_text()).advice
    other = check_versions("hivemind==0.9\nnumpy==1.0\n")
    assert re.match(r"FAILED  versions: hivemind [\d.]+ instead of 0.9, numpy .* instead of 1.0. Run pip", other.line)
    assert not check_versions("torch==0.1\n").advice, "it may fit the driver"
    assert "no-such-package none" in check_versions("no-such-package==1.0\n").line
    assert check_versions("no-such-package==1.0\n").advice


def test_open_files():
    assert not check_open_files(MIN_OPEN_FILES).advice and not check_open_files(-1).advice
    assert "ulimit -n 4096" in check_open_files(1024).advice


def test_memory(monkeypatch):
    """Model and gradients of 350 million parameters are on the GPU, and not in the memory of a notebook."""
    monkeypatch.setattr(check.psutil, "virtual_memory", lambda: SimpleNamespace(available=16e9))
    monkeypatch.setattr(check.psutil, "disk_usage", lambda _path: SimpleNamespace(free=9e9))
    monkeypatch.setattr(check.torch.cuda, "mem_get_info", lambda _device: (8e9, 16e9))

    def faults(num_parameters: int, device: str, local_updates: bool = False) -> list[str]:
        found = check_memories(num_parameters, torch.device(device), local_updates)
        return [finding.subject for finding in found if finding.advice]

    assert faults(350_000_000, "cpu") == ["memory"]
    assert faults(350_000_000, "cuda") == []
    assert faults(350_000_000, "cuda", local_updates=True) == ["GPU memory"]
    assert faults(10**9, "cuda") == ["GPU memory", "memory", "/dev/shm"]
    line = compare_memory("/dev/shm", 64e6, 240e6, "Enlarge it").line
    assert line == "FAILED  /dev/shm: 0.1 GB free, about 0.2 needed. Enlarge it"


def test_addresses():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{PEER}"
        assert not check_address(address).advice
    refused = check_address(address)
    assert "Connection refused" in refused.text and refused.advice
    assert check_address(f"/dns4/no-such-host.invalid/tcp/1/p2p/{PEER}").advice
    assert not check_address(f"/p2p/{PEER}").advice, "found through IPFS"


def test_report_counts_faults_and_says_what_to_do(capsys):
    def fail() -> str:
        raise UserError("too many open files")

    report = Report()
    report.add(Finding("a", "good"))
    assert report.attempt("b", lambda: "fine") and not report.attempt("c", fail)
    assert report.num_faults == 1
    assert capsys.readouterr().out.splitlines()[:2] == ["ok      a: good", "ok      b: fine"]
    assert "ulimit -n 4096" in report.findings[-1].advice


@pytest.mark.parametrize("advice", ["", "Do this"])
def test_line_of_a_finding(advice):
    assert Finding("a", "b", advice).line == ("FAILED  a: b. Do this" if advice else "ok      a: b")


ALBERT_LARGE = 17_847_000
ADDRESSES = [
    f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}",
    "/ip4/192.0.2.2/tcp/1/p2p/QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG",
]


def make_args(**options) -> CollaborationArguments:
    return CollaborationArguments(run_id="run", averaging_timeout=300.0, **options)


@pytest.mark.parametrize(
    ("trainers", "options", "seconds"),
    [
        (8, {}, 122),  # docs/tuning.md
        (8, {"gradient_compression": "blockwise8"}, 92),
        (8, {"client_mode": True}, 70),
        (1, {}, 70),
    ],
)
def test_seconds_of_a_round_are_those_of_the_plan(trainers, options, seconds):
    found = describe_upload(10.0, "quick-otter-3f2a", ALBERT_LARGE, trainers, make_args(**options))
    assert not found.advice
    assert found.text.startswith("10.0 Mbit/s to quick-otter-3f2a; at this speed a round of ")
    assert found.text.endswith(f"{max(2, trainers)} trainers takes about {seconds} s")


def test_round_of_a_tiny_model_takes_no_time():
    assert describe_upload(1e3, "a", 1000, 8, make_args()).text.endswith("of 8 trainers takes less than a second")


def test_round_that_takes_longer_than_it_may_is_a_fault():
    found = describe_upload(4.0, "quick-otter-3f2a", ALBERT_LARGE, 8, make_args())
    assert "takes about 305 s, and --averaging_timeout is 300 s. Use a faster connection" in found.line


def make_heartbeat(auxiliary: bool) -> dict:
    now = get_dht_time()
    progress = PeerProgress(b"", 5, 5, 0, 0, 1.0, now, now, client_mode=False, auxiliary=auxiliary)
    return progress.to_record()


def test_first_initial_peer_that_takes_part_measures_the_upload(monkeypatch):
    """Malformed records and auxiliary peers are no trainers."""
    records = [make_heartbeat(False), make_heartbeat(False), make_heartbeat(True), {}, None]
    subkeys = [RSASignatureValidator(RSAPrivateKey()).local_public_key for _ in records]
    values = {subkey: ValueWithExpiration(record, 0.0) for subkey, record in zip(subkeys, records, strict=True)}
    monkeypatch.setattr(check, "get_dictionary", lambda _dht, key: values if key == "run_training_progress" else {})

    peer, args = (
        SimpleNamespace(dht=FakeUploads("it has an older version of these scripts", Upload(10**6, 1.0))),
        make_args(),
    )
    found = check_upload(peer, ADDRESSES, ALBERT_LARGE, args, 256)
    assert found.text.startswith("8.0 Mbit/s to ") and "a round of 3 trainers" in found.text
    assert "a round of 2 trainers" in check_upload(peer, ADDRESSES, ALBERT_LARGE, args, 2).text
    assert re.fullmatch(
        r"ok      upload: not measured, \w+-\w+-\w+: it has an older version of these scripts",
        check_upload(peer, ADDRESSES[:1], ALBERT_LARGE, args, 256).line,
    )
    assert check_upload(peer, [], ALBERT_LARGE, args, 256).line.endswith("not measured, there are no initial peers")
