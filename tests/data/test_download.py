"""Download of the data: from a good web server, and from one that fails, misreports, changes or is malicious."""

import errno
import gzip
import io
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from arguments import DatasetArguments
from lib.common.errors import UserError, describe
from lib.common.hosts import is_on_internet
from lib.data import archive
from lib.data import download as fetch
from lib.data.archive import DATASET, TOKENIZER, ArchiveError, file_sha256, write_archive
from lib.data.download import fetch_data, public_address
from tests.support.peers import LOCAL, ROOT, Script, wait_until
from tokenize_wikitext103 import TokenizationArguments

SECRET = "hunter2"


class Host(ThreadingHTTPServer):
    """A web server on this machine. `script`: responses to the next requests for the archive, before normal ones."""

    daemon_threads = True

    def __init__(self, content: bytes, digest: str | None):
        super().__init__(("127.0.0.1", 0), Answer)
        self.content, self.digest = content, digest
        self.script: list[Callable[[Answer], None]] = []
        self.requests: list[SimpleNamespace] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/data.tar.gz"

    @property
    def asked(self) -> list[str | None]:
        """Return the requested ranges."""
        return [request.range for request in self.requests if request.path == "/data.tar.gz"]

    @property
    def sent(self) -> int:
        return sum(request.sent for request in self.requests if request.path == "/data.tar.gz")

    def handle_error(self, *_) -> None:
        pass  # the client closed the connection


class Answer(BaseHTTPRequestHandler):
    """One request. The methods below are the elements of a Host's script."""

    protocol_version = "HTTP/1.1"
    server: Host

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        path, _, self.query = self.path.partition("?")
        self.request_log = SimpleNamespace(path=path, query=self.query, range=self.headers.get("Range"), sent=0)
        self.server.requests.append(self.request_log)
        if path.endswith(".sha256"):
            self.send_sha256()
        elif self.server.script:
            self.server.script.pop(0)(self)
        else:
            self.serve()

    def send_sha256(self) -> None:
        text = f"{self.server.digest}  data.tar.gz\n".encode()
        self.send_response(404 if self.server.digest is None else 200)
        self.send_header("Content-Length", "0" if self.server.digest is None else str(len(text)))
        self.end_headers()
        self.wfile.write(b"" if self.server.digest is None else text)

    def send(self, content: bytes) -> None:
        self.wfile.write(content)
        self.request_log.sent += len(content)

    def break_off(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def start(self, length_error: int = 0, ranges: bool = True, offset_error: int = 0) -> bytes:
        """Send the headers; return the body to send next."""
        content, position = self.server.content, 0
        if ranges and self.headers.get("Range"):
            position = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) + offset_error
            if position >= len(content):
                self.reply(416)
                return b""
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {position}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - position + length_error))
        self.end_headers()
        return content[position:]

    def reply(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def serve(self, **options) -> None:
        self.send(self.start(**options))

    def break_after(self, num_bytes: int, **options) -> None:
        self.send(self.start(**options)[:num_bytes])
        self.break_off()

    def stall_after(self, num_bytes: int) -> None:
        self.send(self.start()[:num_bytes])
        self.server.closing.wait(60)
        self.break_off()

    def drip(self) -> None:
        for byte in self.start():
            self.send(bytes([byte]))
            if self.server.closing.wait(0.02):
                return

    def serve_chunked(self, keep: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        content = self.server.content[:keep]
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        if keep is None:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.break_off()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Write folders that look like prepared data."""
    folder = tmp_path_factory.mktemp("prepared")
    files = {
        DATASET: {"manifest.json": b"{}", "dataset_dict.json": b"{}", "train/state.json": b"{}",
                  "train/data-00000-of-00001.arrow": random.Random(0).randbytes(300_000),
                  "validation/data-00000-of-00001.arrow": b"v"},
        TOKENIZER: {"tokenizer_config.json": b"{}", "tokenizer.json": b"{}", "spiece.model": b"s"},
    }  # fmt: skip
    for name, contents in files.items():
        for file, content in contents.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return {name: folder / name for name in files}


@pytest.fixture(scope="module")
def packed(folders, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "data.tar.gz"
    write_archive(path, folders)
    return path


@pytest.fixture
def host(packed, monkeypatch) -> Iterator[Host]:
    monkeypatch.setattr(fetch, "RETRY_POLICY", fetch.RETRY_POLICY.new(backoff_factor=0, backoff_jitter=0, total=2))
    with Host(packed.read_bytes(), file_sha256(packed)) as host:
        thread = threading.Thread(target=partial(host.serve_forever, poll_interval=0.02))
        thread.start()
        yield host
        host.closing.set()
        host.shutdown()
        thread.join()


@pytest.fixture
def args(tmp_path, host) -> DatasetArguments:
    return arguments(tmp_path, host.url)


def arguments(folder: Path, url: str, **flags: str) -> DatasetArguments:
    paths = {"dataset_path": str(folder / "data/dataset"), "tokenizer_path": str(folder / "data/tokenizer")}
    return DatasetArguments(dataset_url=url, **paths, **flags)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def assert_fetched(args: DatasetArguments, folders: dict[str, Path]) -> None:
    found = contents(Path(args.dataset_path))
    assert len(found.pop(fetch.RECEIPT)) == 65
    assert found == contents(folders[DATASET])
    assert contents(Path(args.tokenizer_path)) == contents(folders[TOKENIZER])
    assert sorted(os.listdir(Path(args.dataset_path).parent)) == ["dataset", "tokenizer"]


def names(args: DatasetArguments) -> set[str]:
    """Return the names of the remaining files, without the lock."""
    return set(os.listdir(Path(args.dataset_path).parent)) - {".dataset.lock"}


PARTIAL = {".dataset.download"}  # of an interrupted transfer, which the next run resumes


def fail(args: DatasetArguments) -> str:
    """Return the one-line error of a failed download."""
    with pytest.raises(UserError) as error_info:
        fetch_data(args)
    message = str(error_info.value)
    assert "\n" not in message and SECRET not in message
    return message


# --- transfers -------------------------------------------------------------------------------------------------------


def test_names_in_the_archive_are_where_trainers_look():
    defaults = DatasetArguments()
    assert (defaults.dataset_path, defaults.tokenizer_path) == (DATASET, TOKENIZER)
    assert (TokenizationArguments().output_path, TokenizationArguments().tokenizer_path) == (DATASET, TOKENIZER)


def test_a_host_that_serves_well(args, host, folders):
    fetch_data(args)
    assert_fetched(args, folders)
    assert host.asked == [None] and host.sent == len(host.content)
    fetch_data(args)  # the data exists: no request
    fetch_data(arguments(Path(args.dataset_path).parent.parent, "http://127.0.0.1:9/", dataset_sha256=host.digest))
    assert len(host.requests) == 2


def test_without_the_flag_nothing_is_done(tmp_path):
    fetch_data(DatasetArguments(dataset_path=str(tmp_path / "dataset"), tokenizer_path=str(tmp_path / "tokenizer")))
    assert os.listdir(tmp_path) == []


BREAK = partial(Answer.break_after, num_bytes=100_000)
UNAVAILABLE = partial(Answer.reply, status=503)
REST = "bytes=100000-"


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ([BREAK] * 2, [None, REST, "bytes=200000-"]),
        ([partial(Answer.break_after, num_bytes=60_000)] * 4, [None, *(f"bytes={n}0000-" for n in (6, 12, 18, 24))]),
        ([BREAK, partial(Answer.serve, ranges=False)], [None, REST]),
        ([BREAK, partial(Answer.serve, offset_error=1)], [None, REST, None]),  # another part than that requested
        ([BREAK, partial(Answer.reply, status=416)], [None, REST, None]),
        ([BREAK, partial(Answer.reply, status=302, Location="/data.tar.gz")], [None, REST, REST]),
        ([partial(Answer.serve_chunked, keep=100_000), Answer.serve_chunked], [None, REST]),  # of unknown length
        ([partial(Answer.reply, status=429)] * 2, [None] * 3),
        ([partial(Answer.reply, status=503, Retry_After="nonsense")], [None] * 2),
    ],
)
def test_transfers_that_succeed_in_the_end(args, host, folders, script, asked):
    host.script = list(script)
    fetch_data(args)
    assert_fetched(args, folders)
    assert host.asked == asked


def test_retry_after_is_respected(args, host, caplog):
    host.script = [partial(Answer.reply, status=503, Retry_After="1")]
    started = time.monotonic()
    fetch_data(args)
    assert time.monotonic() - started > 1
    assert "status 503; trying again" in caplog.text


def test_a_transfer_goes_on_in_the_next_run(args, host, folders):
    host.script = [BREAK, *[UNAVAILABLE] * 3]
    message = fail(args)
    assert "503" in message and "--dataset_url" in message
    assert names(args) == PARTIAL
    fetch_data(args)
    assert_fetched(args, folders)
    assert host.asked[-1] == REST and host.sent == len(host.content)


@pytest.mark.parametrize("has_checksum", [True, False])
def test_a_file_that_changes_is_not_glued_together(args, host, folders, has_checksum):
    good, host.content = host.content, b"x" * len(host.content)
    host.digest = host.digest if has_checksum else None
    host.script = [BREAK, *[UNAVAILABLE] * 3]
    fail(args)
    host.content = good
    fetch_data(args)
    assert_fetched(args, folders)
    assert host.asked[-2:] == [REST, None] if has_checksum else host.asked[-1] is None


def test_without_a_checksum_a_transfer_begins_again(args, host, folders):
    host.digest, host.script = None, [BREAK]
    fetch_data(args)
    assert_fetched(args, folders)
    assert host.asked == [None, None]


@pytest.mark.parametrize(
    ("script", "asked", "message"),
    [
        ([partial(Answer.break_after, num_bytes=1000)] * 9, 5, "was lost"),  # limited, even if each brings something
        ([partial(Answer.break_after, num_bytes=1000, ranges=False)] * 9, 3, "was lost"),  # always at the same place
        ([partial(Answer.reply, status=302, Location="/data.tar.gz")] * 30, 11, "TooManyRedirects"),
        *[([partial(Answer.reply, status=status)], 1, f"status {status}") for status in (401, 403, 404, 410)],
    ],
)
def test_transfers_that_fail(args, host, monkeypatch, script, asked, message):
    monkeypatch.setattr(fetch, "MAX_TRIES", 5)
    host.script = list(script)
    assert message in fail(args)
    assert len(host.asked) == asked
    assert names(args) <= PARTIAL


@pytest.mark.parametrize("has_checksum", [True, False])
@pytest.mark.parametrize("error", [1000, -1000])
def test_a_host_that_lies_about_the_length(args, host, error, has_checksum):
    host.digest = host.digest if has_checksum else None
    host.script = [partial(Answer.break_after, num_bytes=10**6, length_error=error, ranges=False)] * 9
    message = fail(args)
    if error > 0:
        assert "cannot be downloaded" in message
    else:
        assert ("SHA-256" if has_checksum else "damaged") in message
    assert names(args) <= PARTIAL


@pytest.mark.parametrize(
    "url",
    [
        "http://host.invalid/data.tar.gz", "https://127.0.0.1:{port}/data.tar.gz", "http://.../data.tar.gz",
        "http://127.0.0.1:9/data.tar.gz",
    ],
)  # fmt: skip
def test_addresses_that_cannot_work(args, host, url):
    args.dataset_url = url.format(port=host.server_port) + f"?token={SECRET}"
    assert "--dataset_url" in fail(args)


@pytest.mark.parametrize("target", ["http://127.0.0.1:{port}/data.tar.gz", "//127.0.0.1:{port}/data.tar.gz"])
def test_a_redirect_from_the_internet_into_this_machine_is_refused(args, host, monkeypatch, target):
    monkeypatch.setattr(fetch, "is_on_internet", {"localhost": True, "127.0.0.1": False}.get)
    args.dataset_url = f"http://localhost:{host.server_port}/data.tar.gz?token={SECRET}"
    host.script = [partial(Answer.reply, status=302, Location=target.format(port=host.server_port))]
    assert "redirects to 127.0.0.1, which is not on the internet: refused" in fail(args)
    assert len(host.asked) == 1


@pytest.mark.parametrize(
    "host, expected",
    [
        ("127.0.0.1", False), ("10.1.2.3", False), ("169.254.169.254", False), ("::1", False), ("8.8.8.8", True),
        ("::ffff:192.168.0.1", False), ("localhost", False), ("host.invalid", True), ("2001:4860:4860::8888", True),
    ],
)  # fmt: skip
def test_hosts_on_the_internet(host, expected):
    assert is_on_internet(host) == expected


def patient_from_now_on(answer: Answer, method: Callable[[Answer], None], name: str) -> None:
    """Respond with a method, and raise the client's limit `NAME`, short so far, to a minute for later requests."""
    setattr(fetch, name, 60.0)
    method(answer)


def test_server_that_stops_sending(args, host, folders, monkeypatch):
    monkeypatch.setattr(fetch, "READ_TIMEOUT", 2.0)
    stall = partial(Answer.stall_after, num_bytes=100_000)
    host.script = [partial(patient_from_now_on, method=stall, name="READ_TIMEOUT")]
    fetch_data(args)
    assert_fetched(args, folders)
    assert host.asked == [None, REST]


def test_server_without_a_response(args, host, monkeypatch):
    monkeypatch.setattr(fetch, "READ_TIMEOUT", 0.2)
    host.script = [lambda answer: answer.server.closing.wait(60)] * 9
    assert "does not respond" in fail(args)
    assert len(host.asked) == 3


def test_slow_server_is_interrupted(args, host, folders, monkeypatch, caplog):
    monkeypatch.setattr(fetch, "SPEED_WINDOW", 0.3)
    host.script = [Answer.drip, partial(patient_from_now_on, method=Answer.serve, name="SPEED_WINDOW")]
    fetch_data(args)
    assert_fetched(args, folders)
    assert "fewer than 1,000 bytes a second" in caplog.text
    assert host.sent < len(host.content) + 1000


# --- checksums -------------------------------------------------------------------------------------------------------


def test_a_wrong_checksum(args, host):
    host.digest = "0" * 64
    message = fail(args)
    assert "0" * 64 in message and "ask the organiser" in message
    assert names(args) == set() and len(host.asked) == 1


def test_flag_overrides_the_checksum_file(args, host, folders):
    args.dataset_sha256, host.digest = host.digest, "0" * 64
    fetch_data(args)
    assert_fetched(args, folders)
    assert [request.path for request in host.requests] == ["/data.tar.gz"]


@pytest.mark.parametrize("answer", [None, "<html>not found</html>"])
def test_missing_checksum_is_reported(args, host, folders, packed, caplog, answer):
    host.digest = answer
    fetch_data(args)
    assert_fetched(args, folders)
    assert "Could not verify the archive" in caplog.text and file_sha256(packed) in caplog.text


def test_the_data_of_another_archive_is_there(args, host):
    fetch_data(args)
    args.dataset_sha256 = "0" * 64
    message = fail(args)
    assert "--dataset_sha256" in message and host.digest in message and args.dataset_path in message


def test_credentials_are_not_logged(args, host, folders, caplog):
    caplog.set_level(logging.DEBUG, "lib.data.download")
    caplog.set_level(logging.WARNING, "urllib3")  # as setup_logging does, with --debug too
    host.script = [Answer.break_off, partial(Answer.break_after, num_bytes=1000), partial(Answer.reply, status=500)]
    args.dataset_url = host.url.replace("//", f"//user:{SECRET}@") + f"?token={SECRET}#{SECRET}"
    host.digest = None
    fetch_data(args)
    assert_fetched(args, folders)
    assert all(request.query == f"token={SECRET}" for request in host.requests)
    assert host.requests[0].path == "/data.tar.gz.sha256"
    assert "trying again" in caplog.text and SECRET not in caplog.text
    assert public_address(args.dataset_url) == host.url


# --- existing data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["dataset", "tokenizer"])
def test_existing_data_is_kept(args, host, folders, kept):
    fetch_data(args)
    missing = {"dataset": args.tokenizer_path, "tokenizer": args.dataset_path}[kept]
    shutil.rmtree(missing)
    mark = Path(args.dataset_path).parent / kept / "mark.json"
    mark.write_text("mine")
    fetch_data(args)
    assert mark.read_text() == "mine"
    mark.unlink()
    assert_fetched(args, folders)


@pytest.mark.parametrize("flag", ["dataset_path", "tokenizer_path"])
def test_occupied_path_is_refused(args, host, flag):
    path = Path(getattr(args, flag))
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("years of work")
    message = fail(args)
    assert f"--{flag}" in message and "choose another path" in message
    assert contents(path.parent) == {f"{path.name}/thesis.txt": b"years of work"} and host.requests == []


# --- malicious archives ----------------------------------------------------------------------------------------------


def entry(name: str, content: bytes = b"", **attributes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, content


def pack(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(mode="w:gz", fileobj=buffer, format=format) as file:
        for info, content in entries:
            file.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


GOOD = (
    entry(f"{DATASET}/manifest.json", b"{}"),
    entry(f"{DATASET}/dataset_dict.json", b"{}"),
    entry(f"{TOKENIZER}/tokenizer_config.json", b"{}"),
)
ARROW = f"{DATASET}/train/data.arrow"
NEITHER = "neither a file nor a folder"
FOREIGN = "not part of the prepared data"


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json", "/evil.json", "evil.json", f"/{ARROW}", f"{DATASET}/../../../evil.json",
        f"{DATASET}/train/../../evil.json", f"{DATASET}/.hidden.json", f"{DATASET}/train/deep/data.arrow",
        f"{TOKENIZER}/..", f"{TOKENIZER}/tokenization.py", f"{TOKENIZER}/a\nb.json", f"{TOKENIZER}/a.json\n",
        f"{TOKENIZER}/\x1b[31m.json",
    ],
)  # fmt: skip
def test_other_names_are_not_unpacked(name):
    with pytest.raises(ArchiveError, match="not part of the prepared data") as error_info:
        archive._locate(name)
    assert str(error_info.value).isprintable()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (entry("../evil.json", b"x"), FOREIGN),
        (entry(f"{TOKENIZER}/{'n' * 300}/x.json", b"x"), FOREIGN),  # a name in a separate header
        (entry(ARROW, type=tarfile.SYMTYPE, linkname="/etc/passwd"), NEITHER),
        (entry(f"{DATASET}/train", type=tarfile.SYMTYPE, linkname="../../.."), NEITHER),
        (entry(ARROW, type=tarfile.LNKTYPE, linkname=f"{DATASET}/manifest.json"), NEITHER),
        (entry(ARROW, type=tarfile.CHRTYPE, devmajor=1, devminor=3), NEITHER),
        (entry(ARROW, type=tarfile.BLKTYPE), NEITHER),
        (entry(ARROW, type=tarfile.FIFOTYPE), NEITHER),
        (entry(ARROW, b"x" * 600, type=tarfile.GNUTYPE_SPARSE), NEITHER),
        (
            entry(ARROW, pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": "9" * 12}),
            "an entry in it has an invalid size",
        ),
        (entry(ARROW, pax_headers={"comment": "x" * 10**6}), "a header in it has an invalid size"),
        (entry(ARROW, pax_headers={"size": str(10**15)}), "unpacks to more than"),
        (entry(ARROW, pax_headers={"size": "-1024"}), "an entry in it has an invalid size"),
    ],
)
def test_malicious_archives_are_refused(args, host, tmp_path, bad, reason):
    host.content, host.digest = pack(*GOOD, bad), None
    message = fail(args)
    assert reason in message and message.isprintable()
    assert names(args) == set()
    assert os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_manually_packed_archives(args, host, format):
    folder = entry(f"./{DATASET}", type=tarfile.DIRTYPE, mode=0)
    host.content = pack(folder, *GOOD, entry(f"./{TOKENIZER}/vocab.txt", b"a", mode=0o6777), format=format)
    host.digest = None
    fetch_data(args)
    assert (Path(args.tokenizer_path) / "vocab.txt").stat().st_mode & 0o7111 == 0


def test_a_small_archive_that_unpacks_to_much(args, host, monkeypatch):
    """It is refused at the header with too large a size, in any order of the entries."""
    monkeypatch.setattr(archive, "MIN_LIMIT", 10**6)
    host.content, host.digest = pack(*GOOD, entry(ARROW, bytes(3 * 10**6))), None
    assert "unpacks to more than 1 MB" in fail(args)
    assert names(args) == set()
    host.content = pack(*GOOD, *[entry(ARROW, bytes(3 * 10**5)) for _ in range(4)])
    assert "unpacks to more than 1 MB" in fail(args)
    assert names(args) == set()


def test_an_archive_of_too_many_files(args, host, monkeypatch):
    monkeypatch.setattr(archive, "MAX_MEMBERS", 50)
    entries = [entry(f"{DATASET}/train/{number}.json") for number in range(51)]
    host.content, host.digest = pack(*GOOD, *entries), None
    assert "50 files" in fail(args)
    assert names(args) == set()


@pytest.mark.parametrize("left_out", range(len(GOOD)))
def test_an_archive_that_lacks_something(args, host, left_out):
    host.content, host.digest = pack(*GOOD[:left_out], *GOOD[left_out + 1 :]), None
    name = GOOD[left_out][0].name
    if name.endswith("dataset_dict.json"):  # detected when the dataset is read
        fetch_data(args)
        assert contents(Path(args.dataset_path)).keys() == {"manifest.json", fetch.RECEIPT}
        return
    assert f"lacks {name}" in fail(args)
    assert names(args) == set()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"<html>Sign in to download</html>",
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-4],
        lambda content: content[:150_000] + b"\0\0" + content[150_002:],
        lambda content: content[:-8] + b"abcd" + content[-4:],
        lambda content: gzip.compress(b"not a tar" * 1000),
    ],
)
def test_damaged_archives(args, host, damage):
    host.content, host.digest = damage(host.content), None
    assert "damaged or not a .tar.gz file" in fail(args)
    assert names(args) == set()


# --- the disk --------------------------------------------------------------------------------------------------------


def test_the_disk_is_full_while_unpacking(args, host, folders, monkeypatch):
    def fill(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "copyfileobj", fill)
        with pytest.raises(OSError, match="No space left") as error_info:
            fetch_data(args)
    folder = Path(args.dataset_path).parent
    assert describe(error_info.value) == f"{folder}: the disk is full: free some space or choose another folder"
    assert names(args) == PARTIAL
    fetch_data(args)
    assert_fetched(args, folders)
    assert host.sent == len(host.content)  # the downloaded archive is still valid


@pytest.mark.parametrize("left", [0, 2])
def test_insufficient_disk_space_is_detected_in_advance(args, host, monkeypatch, left):
    """`left`: number of checks that find enough space."""
    free = [10**9] * left
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free.pop() if free else 10**5))
    message = fail(args)
    assert "free some space or choose another folder" in message
    assert names(args) == (PARTIAL if left else set())


# --- processes -------------------------------------------------------------------------------------------------------

# As run_trainer.py does, without its other imports, which take seconds.
PROCESS = """
import logging, sys
from arguments import DatasetArguments
from lib.common.errors import run_script
from lib.data.download import fetch_data
from lib.common.processes import StopSignal
logging.basicConfig(level=logging.INFO)
def main():
    with StopSignal():
        fetch_data(DatasetArguments(dataset_path=sys.argv[1], tokenizer_path=sys.argv[2], dataset_url=sys.argv[3]))
run_script(main)
"""


def test_two_at_once(args, host, folders, caplog):
    caplog.set_level(logging.INFO, "lib.data.download")
    host.script = [partial(Answer.stall_after, num_bytes=100_000)]
    with ThreadPoolExecutor(2) as pool:
        downloads = [pool.submit(fetch_data, args)]
        wait_until(lambda: host.sent >= 100_000, 120, "the first begins to download")
        downloads.append(pool.submit(fetch_data, args))
        wait_until(lambda: "Another process is downloading the data; waiting" in caplog.text, 60, "the second waits")
        host.closing.set()  # ends the stall: the first continues
        for download in downloads:
            download.result(60)
    assert_fetched(args, folders)
    assert host.asked == [None, REST]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_while_downloading(args, host, folders, number):
    host.script = [partial(Answer.stall_after, num_bytes=100_000)]
    partial_file = Path(args.dataset_path).parent / ".dataset.download"
    command = [sys.executable, "-c", PROCESS, args.dataset_path, args.tokenizer_path, args.dataset_url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            wait_until(lambda: partial_file.exists() and partial_file.stat().st_size > 90_000, 120, "a part of it")
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    code = process.returncode
    assert code == (-number if number == signal.SIGKILL else 0)
    assert "Traceback" not in output
    assert names(args) == PARTIAL
    size = partial_file.stat().st_size
    fetch_data(args)
    assert_fetched(args, folders)
    assert host.asked == [None, f"bytes={size}-"]


@pytest.mark.peers
def test_a_trainer_fetches_and_trains(args, host, tmp_path, data, launcher):
    host.digest = write_archive(tmp_path / "real.tar.gz", {DATASET: data / "dataset", TOKENIZER: data / "tokenizer"})
    host.content = (tmp_path / "real.tar.gz").read_bytes()
    script = Script(
        "run_trainer.py", "--host_maddrs", LOCAL, "--output_dir", tmp_path / "out", "--dataset_url", host.url,
        "--dataset_path", args.dataset_path, "--tokenizer_path", args.tokenizer_path, "--model_name_or_path",
        data / "config.json", log=tmp_path / "trainer.log", launcher=launcher,
    )  # fmt: skip
    try:
        script.wait_for("--initial_peers /ip4")
        assert script.stop() == 0
        script.assert_nothing_left()
    finally:
        script.kill_all()
    assert host.asked == [None]
