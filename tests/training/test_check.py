"""Tests of --check without peers."""

import re
import socket

import pytest

from lib.common.errors import UserError
from lib.training.check import (
    MIN_OPEN_FILES,
    REQUIREMENTS,
    Finding,
    Report,
    check_address,
    check_memory,
    check_open_files,
    check_versions,
)

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


def test_memory():
    assert not check_memory(10**6, 8e9, 8e9).advice
    assert "more memory" in check_memory(10**9, 8e9, 80e9).advice
    assert "--shm-size" in check_memory(10**7, 8e9, 64e6).advice


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
