"""Download of the data: from a good web server, and from one that fails, misreports, changes or is malicious."""

import contextlib
import dataclasses
import datetime
import errno
import gzip
import io
import ipaddress
import json
import logging
import os
import random
import shutil
import socket
import ssl
import struct
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from safetensors.numpy import save_file

from arguments import DatasetArguments, ModelArguments
from cotrain.common.errors import UserError, describe
from cotrain.common.hosts import GuardedAdapter, GuardedConnection
from cotrain.data import archive, archive_folders
from cotrain.data import download as fetch
from cotrain.data.archive import DATASET, TOKENIZER, file_sha256, unpack_head, write_archive
from cotrain.data.archive_folders import RECEIPT
from cotrain.data.download import fetch_data
from cotrain.data.loading import load_split
from cotrain.data.manifest import Manifest
from cotrain.data.schemas import SCHEMAS
from cotrain.models.objectives import SPLITS
from cotrain.options import NOTHING, Adopted
from cotrain.preparation.preview import PREVIEW_NAME
from cotrain.settings import BASE_FOLDER
from tests.support.peers import wait_until

SECRET = "hunter2"


class Host(ThreadingHTTPServer):
    """A web server of a folder. `script`: responses to the next requests, before normal ones."""

    daemon_threads = True

    def __init__(self, folder: Path, address: str = "127.0.0.1"):
        super().__init__((address, 0), Answer)
        self.archive, self.away = folder / "data.tar.gz", False
        self.script: list[Callable[[Answer], None]] = []
        self.requests: list[str] = []  # paths with query
        self.asked: list[str | None] = []  # ranges
        self.passwords: list[str | None] = []
        self.closing = threading.Event()
        self.thread = threading.Thread(target=partial(self.serve_forever, poll_interval=0.02))

    def __enter__(self) -> "Host":
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.closing.set()
        self.shutdown()
        self.thread.join()
        self.server_close()

    @property
    def content(self) -> bytes:
        return self.archive.read_bytes()

    @content.setter
    def content(self, content: bytes) -> None:
        self.archive.write_bytes(content)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_port}/data.tar.gz"

    def handle_error(self, *_) -> None:
        pass  # the client closed the connection


class Answer(BaseHTTPRequestHandler):
    """One request. The methods below are the elements of a Host's script."""

    protocol_version = "HTTP/1.1"
    server: Host

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        self.server.passwords.append(self.headers.get("Authorization"))
        self.server.asked.append(self.headers.get("Range"))
        method = self.server.script.pop(0) if self.server.script else Answer.serve
        self.reply(503) if self.server.away else method(self)

    def reply(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def serve(
        self, num_bytes: int | None = None, ranges: bool = True, length_error: int = 0, offset_error: int = 0
    ) -> None:
        """Send a file from the requested position; break off after `num_bytes`."""
        path, position, status = self.server.archive.with_name(Path(self.path.partition("?")[0]).name), 0, 200
        if not path.is_file():
            return self.reply(404)
        content = path.read_bytes()
        if ranges and self.headers.get("Range"):
            status = 206
            position = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) + offset_error
            if position >= len(content):
                return self.reply(416)
        self.reply(status, Content_Length=str(len(content) - position + length_error))
        self.wfile.write(content[position:][:num_bytes])
        if num_bytes is not None:
            self.break_off()

    def break_off(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        """Send a part of the archive, then nothing until the test ends."""
        self.reply(200, Content_Length=str(len(self.server.content)))
        self.wfile.write(self.server.content[:100_000])
        self.server.closing.wait(120)
        self.break_off()

    def drip(self) -> None:
        self.reply(200, Content_Length=str(len(self.server.content)))
        for byte in self.server.content[:200]:
            self.wfile.write(bytes([byte]))
            if self.server.closing.wait(0.02):
                return
        self.break_off()

    def serve_chunked(self) -> None:
        """Send the archive without its size."""
        content = self.server.content
        self.reply(200, f"{len(content):x}\r\n".encode() + content + b"\r\n0\r\n\r\n", Transfer_Encoding="chunked")


def arrow(input_ids: object, *, attention_mask: object = None, metadata: dict | None = None) -> bytes:
    """Return an Arrow file with samples for causal LM. Columns that are Arrow arrays are written as they are."""
    mask = [[1] * len(sample) for sample in input_ids] if attention_mask is None else attention_mask
    columns = {"input_ids": input_ids, "attention_mask": mask}
    fields = {name: SCHEMAS["clm"].field(name).type for name in columns}
    arrays = [x if isinstance(x, pa.Array) else pa.array(x, fields[name]) for name, x in columns.items()]
    table = pa.table(arrays, names=list(columns)).replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def manifest(**changes: object) -> bytes:
    values = {"source": "", "objective": "clm", "max_seq_length": 1000, "seed": 0, "language": "en", "tokenizer": "",
              "tokenizer_class": "", "vocab_size": 2**31 - 1, "tokenizer_sha256": ""}  # fmt: skip
    splits = {"train": {"instances": 2}, "validation": {"instances": 1}}
    return json.dumps(dataclasses.asdict(Manifest(**{**values, "splits": splits, **changes}))).encode()


SAMPLES, SAMPLE = arrow([[1, 2], [3, 4]]), arrow([[5, 6]])


@pytest.fixture(scope="module")
def folders(data) -> dict[str, Path]:
    return {DATASET: data / "dataset", TOKENIZER: data / "tokenizer"}


@pytest.fixture(scope="module")
def packed(folders, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "data.tar.gz"
    write_archive(path, folders)
    return path


@pytest.fixture
def host(packed, tmp_path_factory, monkeypatch) -> Iterator[Host]:
    monkeypatch.setattr(fetch, "PAUSES", (0, 0))
    with Host(Path(shutil.copy(packed, tmp_path_factory.mktemp("public"))).parent) as host:
        yield host


@pytest.fixture
def gateway(packed, monkeypatch) -> Iterator[Host]:
    """A web server at 127.0.0.2, which stands for an address on the internet."""
    for name, value in (("is_global", True), ("is_private", False), ("is_loopback", False)):
        known = getattr(ipaddress.IPv4Address, name).fget
        answer = property(lambda self, known=known, value=value: value if str(self) == "127.0.0.2" else known(self))
        monkeypatch.setattr(ipaddress.IPv4Address, name, answer)
    with Host(packed.parent, "127.0.0.2") as host:
        yield host


@pytest.fixture
def args(tmp_path, host) -> DatasetArguments:
    paths = {"dataset_path": str(tmp_path / "data/dataset"), "tokenizer_path": str(tmp_path / "data/tokenizer")}
    return DatasetArguments(dataset_url=host.url, dataset_sha256=file_sha256(host.archive), **paths)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder but the preview, which archives leave out."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != PREVIEW_NAME)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def assert_fetched(args: DatasetArguments, folders: dict[str, Path]) -> None:
    found = contents(Path(args.dataset_path))
    receipt = found.pop(RECEIPT)
    assert len(receipt.split()[0]) == 64
    assert found == contents(folders[DATASET])
    assert contents(Path(args.tokenizer_path)) == {**contents(folders[TOKENIZER]), RECEIPT: receipt}
    assert sorted(os.listdir(Path(args.dataset_path).parent)) == ["dataset", "tokenizer"]


PARTIAL = {".dataset.download"}  # of an interrupted transfer, which the next run resumes


def fail(args: DatasetArguments, leftovers: set[str] | None = None, adopted: Adopted = NOTHING) -> str:
    """Return the one-line error of a failed download; check which files it leaves. Default: none but a partial one."""
    with pytest.raises(UserError) as error_info:
        fetch_data(args, adopted)
    message = str(error_info.value)
    assert message.isprintable() and SECRET not in message
    left = set(os.listdir(Path(args.dataset_path).parent)) - {".dataset.lock"}
    assert left <= PARTIAL if leftovers is None else left == leftovers
    return message


# --- transfers -------------------------------------------------------------------------------------------------------


def test_a_monitor_downloads_the_tokenizer_alone(tmp_path, host, folders):
    args = ModelArguments(
        dataset_url=host.url, dataset_sha256=file_sha256(host.archive), tokenizer_path=str(tmp_path / "tokenizer")
    )
    for _ in range(2):
        fetch_data(args, NOTHING)
    found = contents(tmp_path / "tokenizer")
    assert found.pop(RECEIPT).decode().split() == [args.dataset_sha256, host.url]
    assert os.listdir(tmp_path) == ["tokenizer"] and found == contents(folders[TOKENIZER])
    assert host.requests == ["/data.tar.gz"]


@pytest.fixture
def large(host, folders, tmp_path_factory, monkeypatch) -> dict[str, Path]:
    """Host an archive that counts as large, with a base; return its folders."""
    base = tmp_path_factory.mktemp("base")
    (base / "config.json").write_text("{}", encoding="utf-8")
    save_file({"x": np.frombuffer(random.Random(0).randbytes(3_000_000), np.uint8)}, base / "model.safetensors")
    monkeypatch.setattr(archive, "LARGE", 1e5)
    monkeypatch.setattr(fetch, "LARGE", 1e5)
    monkeypatch.setattr(fetch, "FIRST_LOOK", 1000)
    monkeypatch.setattr(fetch, "READ_BYTES", 1000)
    write_archive(host.archive, folders := {**folders, BASE_FOLDER: base})
    return folders


def open_monitor(host: Host, **options) -> ModelArguments:
    digests = {"dataset_sha256": file_sha256(host.archive), "dataset_head_sha256": unpack_head(host.archive, {})}
    return ModelArguments(dataset_url=host.url, tokenizer_path="data/tokenizer", **digests, **options)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_monitor_reads_the_head_of_a_large_archive(tmp_path, host, large, monkeypatch, caplog, is_old):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    if is_old:  # in the order of names
        with monkeypatch.context() as context:
            context.setattr(archive, "LARGE", 1e9)
            write_archive(host.archive, large)
    if not is_old:  # the archive needs not fit on the disk
        monkeypatch.setattr(fetch, "check_space", lambda _, size: size < 10_000 or pytest.fail("no space"))
    received = []
    monkeypatch.setattr(fetch.ProgressBar, "update", lambda _, count: received.append(count))
    args = open_monitor(host, model_name_or_path=BASE_FOLDER, lora_rank=4)
    for _ in range(2):
        fetch_data(args, NOTHING)
    assert host.requests == ["/data.tar.gz"]
    assert sum(received) > 3_000_000 if is_old else sum(received) < 500_000
    assert ("have what is needed" in caplog.text) != is_old
    assert sorted(os.listdir("data")) == ["model", "tokenizer"]
    found = contents(tmp_path / "data/tokenizer")
    assert found.pop(RECEIPT).decode().split() == [args.dataset_sha256, host.url]
    assert found == contents(large[TOKENIZER])
    assert (tmp_path / "data/model/model.safetensors").exists() == is_old
    monkeypatch.setattr(fetch, "check_space", archive.check_space)
    # A trainer in the same folder needs the rest, and compares all.
    data = DatasetArguments(**{name: getattr(args, name) for name in (
        "dataset_url", "dataset_sha256", "tokenizer_path", "model_name_or_path", "lora_rank"
    )}, dataset_path="data/dataset")  # fmt: skip
    fetch_data(data, NOTHING, has_weights=True)
    fetch_data(data, NOTHING, has_weights=True)
    assert host.requests == ["/data.tar.gz"] * 2 and contents(tmp_path / "data/dataset").pop(RECEIPT)
    assert contents(tmp_path / "data/model").keys() == {RECEIPT, "config.json", "model.safetensors"}


@pytest.mark.parametrize("lacks", ["digest", "weights"])
def test_the_head_is_not_enough_without_a_digest_or_for_weights(tmp_path, host, large, monkeypatch, caplog, lacks):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    args = open_monitor(host, model_name_or_path=BASE_FOLDER, lora_rank=4)
    args.dataset_head_sha256 = args.dataset_head_sha256 if lacks == "weights" else None
    fetch_data(args, NOTHING, has_weights=lacks == "weights")
    assert (tmp_path / "data/model/model.safetensors").exists() and "have what is needed" not in caplog.text


@pytest.mark.parametrize("is_stated", [True, False])
def test_the_host_of_a_large_archive_gives_a_monitor_no_other_tokenizer(tmp_path, host, large, monkeypatch, is_stated):
    """The head was taken without a comparison, for want of its SHA-256."""
    monkeypatch.chdir(tmp_path)
    args = open_monitor(host, model_name_or_path=BASE_FOLDER, lora_rank=4)
    args.dataset_head_sha256 = args.dataset_head_sha256 if is_stated else None
    other = Path(shutil.copytree(large[TOKENIZER], tmp_path / "other"))
    (other / "chat_template.jinja").write_text("of the host", encoding="utf-8")
    write_archive(host.archive, {**large, TOKENIZER: other})
    with pytest.raises(
        UserError, match=r"SHA-256 \w{64} instead of \w{64}; ask the organiser which is right"
    ) as error:
        fetch_data(args, NOTHING)
    assert str(error.value).isprintable() and os.listdir(tmp_path / "data") == [".tokenizer.lock"]


def test_a_large_archive_whose_head_is_damaged_is_refused(tmp_path, host, large, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = open_monitor(host)
    host.content = host.content[:200] + b"damage" + host.content[206:]
    with pytest.raises(UserError, match="has SHA-256"):
        fetch_data(args, NOTHING)
    assert os.listdir(tmp_path / "data") == [".tokenizer.lock"]


def test_existing_data_is_not_downloaded(args, host, folders):
    address, args.dataset_url = args.dataset_url, None
    fetch_data(args, NOTHING)
    assert host.requests == []
    args.dataset_url = address
    fetch_data(args, NOTHING)
    assert_fetched(args, folders)
    fetch_data(args, NOTHING)
    assert host.requests == ["/data.tar.gz"]


@pytest.fixture
def other_host(tmp_path_factory, folders) -> Iterator[Host]:
    """A host of another run's archive, which has another tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    tokenizer = Path(shutil.copytree(folders[TOKENIZER], folder / "tokenizer"))
    (tokenizer / "other.txt").write_text("of another run", encoding="utf-8")
    write_archive(folder / "data.tar.gz", {**folders, TOKENIZER: tokenizer})
    with Host(folder) as host:
        yield host


def is_of_the_other_run(args) -> bool:
    return (Path(args.tokenizer_path) / "other.txt").exists()


@pytest.mark.parametrize("has_digest", [True, False])
@pytest.mark.parametrize("is_monitor", [True, False])
def test_data_of_another_run_is_moved_aside_and_back(args, host, other_host, caplog, has_digest, is_monitor):
    if is_monitor:
        args = ModelArguments(tokenizer_path=args.tokenizer_path)
    for round_of, (current, is_other) in enumerate(
        [(host, False), (other_host, True), (host, False), (other_host, True)]
    ):
        args.dataset_url = current.url
        args.dataset_sha256 = file_sha256(current.archive) if has_digest else None
        caplog.clear()
        fetch_data(args, NOTHING)
        archive_folders.in_use.clear()  # as in a new process
        assert is_of_the_other_run(args) == is_other
        assert ("was from another archive" in caplog.text) == (round_of > 0)
    assert host.requests == other_host.requests == ["/data.tar.gz"], "each is downloaded once"


def test_data_that_a_trainer_reads_is_not_moved(args, host, other_host):
    fetch_data(args, NOTHING)
    args.dataset_url, args.dataset_sha256 = other_host.url, file_sha256(other_host.archive)
    message = fail(args, leftovers={"dataset", "tokenizer"})
    assert "--dataset_path" in message and "stop it" in message and other_host.requests == []
    archive_folders.in_use.popitem()[1].close()  # the trainer ends
    fetch_data(args, NOTHING)
    assert is_of_the_other_run(args)


def test_data_without_a_receipt_is_left_as_it_is(args, host, folders, caplog):
    """It was prepared on this machine, or by hand."""
    for name in folders:
        shutil.copytree(folders[name], Path(args.dataset_path).with_name(name.rsplit("/")[-1]), dirs_exist_ok=True)
    args.dataset_path = str(Path(args.dataset_path).with_name(DATASET.rsplit("/")[-1]))
    fetch_data(args, NOTHING)
    assert host.requests == [] and not caplog.text
    fetch_data(ModelArguments(dataset_url=host.url, tokenizer_path=args.tokenizer_path), NOTHING)
    assert host.requests == [] and "does not say from which archive" in caplog.text


BREAK = partial(Answer.serve, num_bytes=100_000)
UNAVAILABLE = partial(Answer.reply, status=503)
TO_ITSELF = partial(Answer.reply, status=302, Location="/data.tar.gz")
REST = "bytes=100000-"


def answer_200(answer: Answer, says_where: bool) -> None:
    """Send the rest of the archive that is asked for, but with status 200, as some caches do."""
    content = answer.server.content[100_000:]
    size = len(answer.server.content)
    where = {"Content_Range": f"bytes 100000-{size - 1}/{size}"} if says_where else {}
    answer.reply(200, content, **where)


def expire(answer: Answer) -> None:
    """Redirect to an address that is refused, as one that was signed for a short time."""
    answer.server.script.insert(0, partial(Answer.reply, status=403))
    TO_ITSELF(answer)


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ([BREAK] * 2, [None, REST, "bytes=200000-"]),
        ([partial(Answer.serve, num_bytes=60_000)] * 4, [None, *(f"bytes={n}0000-" for n in (6, 12, 18, 24))]),
        ([BREAK, partial(Answer.serve, ranges=False)], [None, REST]),
        ([BREAK, partial(Answer.serve, offset_error=1)], [None, REST, None]),  # another part than that requested
        ([BREAK, partial(Answer.reply, status=416)], [None, REST, None]),
        ([BREAK, TO_ITSELF], [None, REST, REST]),
        ([BREAK, partial(answer_200, says_where=True)], [None, REST]),
        ([BREAK, partial(answer_200, says_where=False)], [None, REST, None]),
        ([BREAK, expire], [None, REST, REST, REST]),
        ([Answer.serve_chunked], [None]),  # of unknown length
        ([partial(Answer.reply, status=429)] * 2, [None] * 3),
    ],
)
def test_transfers_that_succeed_in_the_end(args, host, folders, script, asked):
    host.script = list(script)
    fetch_data(args, NOTHING)
    assert_fetched(args, folders)
    assert host.asked == asked


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [("40", 40), ("7200", fetch.MAX_RETRY_AFTER), ("-5", 0), ("soon", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)
def test_a_server_says_how_long_to_wait(args, host, folders, monkeypatch, answer, seconds):
    waited = []
    monkeypatch.setattr(fetch.time, "sleep", waited.append)
    host.script = [partial(Answer.reply, status=429, Retry_After=answer)]
    fetch_data(args, NOTHING)
    assert_fetched(args, folders)
    assert waited == [seconds]


def test_a_certificate_that_is_not_trusted_is_named(args, host, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("certificate")
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a proxy at school")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "certificate.pem"
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    content = certificate.public_bytes(serialization.Encoding.PEM)
    file.write_bytes(content + key.private_bytes(serialization.Encoding.PEM, *plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    host.socket = context.wrap_socket(host.socket, server_side=True)
    args.dataset_url = args.dataset_url.replace("http", "https")
    message = fail(args, leftovers=set())
    assert "certificate" in message and "REQUESTS_CA_BUNDLE" in message
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(file))
    for adopted in (NOTHING, chosen_by_the_run("127.0.0.1")):
        fetch_data(args, adopted)
        shutil.rmtree(Path(args.dataset_path).parent)


def test_a_proxy_that_needs_a_package_is_named(args, host, monkeypatch):
    """The address of the data was accused: "cannot be requested (InvalidSchema); check the address"."""
    missing = requests.exceptions.InvalidSchema("Missing dependencies for SOCKS support.")
    monkeypatch.setattr(requests.Session, "send", Mock(side_effect=missing))
    message = fail(args, leftovers=set())
    assert "ALL_PROXY" in message and "PySocks" in message and args.dataset_url not in message


@pytest.mark.parametrize(
    ("has_checksum", "changes", "last_asked"),
    [(True, False, [REST]), (True, True, [REST, None]), (False, True, [None])],
)
def test_a_transfer_goes_on_in_the_next_run(args, host, folders, has_checksum, changes, last_asked):
    good = host.content
    if changes:  # the two parts are not glued together
        host.content = b"x" * len(good)
    args.dataset_sha256 = args.dataset_sha256 if has_checksum else None
    host.script = [BREAK, *[UNAVAILABLE] * 2]
    message = fail(args, leftovers=PARTIAL)
    assert "503" in message and "--dataset_url" in message
    host.content = good
    num_asked = len(host.asked)
    fetch_data(args, NOTHING)
    assert_fetched(args, folders)
    assert host.asked[num_asked:] == last_asked


@pytest.mark.parametrize(
    ("script", "asked", "message"),
    [
        ([partial(Answer.serve, num_bytes=1000)], 5, "(IncompleteRead)"),  # limited, even if each brings something
        ([partial(Answer.serve, num_bytes=1000, ranges=False)], 3, "(IncompleteRead)"),  # always at the same place
        ([partial(Answer.serve, length_error=1000, ranges=False, num_bytes=10**6)], 3, "cannot be downloaded"),
        ([partial(Answer.serve, length_error=-1000)], 1, "SHA-256"),
        ([TO_ITSELF], 11, "TooManyRedirects"),
        *[([partial(Answer.reply, status=status)], 1, f"status {status}") for status in (401, 403, 404, 410)],
    ],
)
def test_transfers_that_fail(args, host, monkeypatch, script, asked, message):
    monkeypatch.setattr(fetch, "MAX_TRIES", 5)
    host.script = script * 30
    assert message in fail(args)
    wait_until(lambda: len(host.asked) >= asked, 120, "the last request")  # the client may have given it up before
    assert len(host.asked) == asked


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


REFUSED = "leads to 127.0.0.1, which is not on the internet: refused; if you trust it, pass"


def chosen_by_the_run(*initial_peers: str) -> Adopted:
    return Adopted(frozenset({"dataset_url"}), tuple(map(ipaddress.ip_address, initial_peers)))


@pytest.mark.parametrize("is_chosen", [False, True])
@pytest.mark.parametrize("target", ["http://127.0.0.1:{port}/data.tar.gz", "//127.0.0.1:{port}/data.tar.gz"])
def test_a_redirect_from_the_internet_into_this_machine_is_refused(args, host, gateway, target, is_chosen):
    args.dataset_url = f"http://127.0.0.2:{gateway.server_port}/data.tar.gz?token={SECRET}"
    args.dataset_sha256 = None
    gateway.script = [partial(Answer.reply, status=302, Location=target.format(port=host.server_port))]
    assert REFUSED in fail(args, adopted=chosen_by_the_run("8.8.4.4") if is_chosen else NOTHING)
    assert len(gateway.asked) == 1 and host.requests == []


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/data.tar.gz",
        "http://127.0.0.1:{port}\\@8.8.8.8/../latest/meta-data?x=",
        "http://[::ffff:127.0.0.1]:{port}/data.tar.gz",
        "http://2130706433:{port}/data.tar.gz",
        "http://0x7f.1:{port}/data.tar.gz",
        "https://localhost:{port}/data.tar.gz",
        "http://rebound.example:{port}/data.tar.gz",
    ],
)
def test_an_address_of_the_run_leads_to_the_internet_only(args, host, monkeypatch, url):
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *rest: look_up(name.replace("rebound.example", "127.0.0.1"), *rest)
    )
    args.dataset_url = url.format(port=host.server_port)
    assert REFUSED in fail(args, adopted=chosen_by_the_run("8.8.4.4", "192.168.1.2"))
    assert host.requests == []


@pytest.mark.parametrize(
    ("address", "initial_peer", "is_safe"),
    [
        ("203.0.113.7", "8.8.4.4", False),  # reserved for documentation
        ("8.8.8.8", "8.8.4.4", True),
        ("2001:4860:4860::1", "8.8.4.4", True),
        ("127.0.0.1", "8.8.4.4", False),
        ("127.0.0.1", "192.168.1.2", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("192.168.1.7", "8.8.4.4", False),
        ("192.168.1.7", "192.168.1.2", True),
        ("10.0.0.7", "127.0.0.1", False),
        ("192.168.0.1", "192.168.1.2", False),
        ("10.9.0.1", "10.0.0.1", False),
        ("fd00:ec2::254", "10.0.0.1", False),
        ("fd00:ec2::254", "fd00::1", False),
        ("fd00::7", "fd00::1", True),
        ("64:ff9b::a9fe:a9fe", "8.8.4.4", False),  # 169.254.169.254 behind NAT64
        ("64:ff9b::808:808", "8.8.4.4", True),
        ("169.254.169.254", "192.168.1.2", False),
        ("::1", "8.8.4.4", False),
        ("fe80::1%eth0", "8.8.4.4", False),
        ("::ffff:127.0.0.1", "8.8.4.4", False),
        ("::ffff:192.168.0.1", "8.8.4.4", False),
    ],
)
def test_data_is_not_fetched_from_a_private_network_of_the_volunteer(address, initial_peer, is_safe, monkeypatch):
    connected = SimpleNamespace(getpeername=lambda: (address, 80), close=lambda: None)
    monkeypatch.setattr("urllib3.util.connection.create_connection", lambda *_args, **_options: connected)
    adapter = GuardedAdapter([ipaddress.ip_address(initial_peer)])
    with contextlib.nullcontext() if is_safe else pytest.raises(UserError, match="not on the internet"):
        guarded = GuardedConnection("name.example", adapter=adapter)
        guarded.connect()
        assert guarded.sock is connected


def test_an_address_of_the_run_gets_no_password_and_no_proxy(args, host, folders, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text(f"default login me password {SECRET}\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    fetch_data(args, chosen_by_the_run("127.0.0.1"))
    assert_fetched(args, folders)
    assert host.passwords == [None]


def test_a_proxy_that_does_not_answer_is_named(args, host, monkeypatch):
    """The line said that the host of the data had refused the connection."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert "cannot be downloaded (the proxy of http_proxy: Connection refused)" in fail(args)


@pytest.mark.parametrize("method", [Answer.serve, Answer.serve_chunked])
def test_an_archive_that_the_run_has_chosen_has_a_limit(args, host, folders, monkeypatch, method):
    monkeypatch.setattr(fetch, "MAX_DOWNLOAD_BYTES", 240_000)
    host.script, address = [method], args.dataset_url
    message = "has more than 0.00024 GB: refused; if you want it, pass the address yourself"
    assert message in fail(args, leftovers=set(), adopted=chosen_by_the_run("127.0.0.1"))
    args.dataset_url = address
    host.script = [method]
    fetch_data(args, NOTHING)
    assert_fetched(args, folders)


def test_disk_space_is_checked_during_a_transfer_of_unknown_size(args, host, monkeypatch):
    host.script, spaces = [Answer.serve_chunked], iter([10**9, 10**9])
    monkeypatch.setattr(fetch, "READ_BYTES", 100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(spaces, 10**7)))
    assert "MB are needed, 10 MB are free" in fail(args)
    assert 0 < (Path(args.dataset_path).parent / ".dataset.download").stat().st_size <= 100_000


@pytest.mark.parametrize(
    ("method", "limit", "seconds", "message"),
    [
        (Answer.stall, "SILENCE_TIMEOUT", 2.0, "127.0.0.1"),
        (Answer.drip, "SPEED_WINDOW", 0.3, "fewer than 1,000 bytes a second"),
    ],
)
def test_server_that_stops_or_is_slow(args, host, folders, monkeypatch, caplog, method, limit, seconds, message):
    restore = partial(monkeypatch.setattr, fetch, limit, 60.0)  # the limit is for the first response alone
    monkeypatch.setattr(fetch, limit, seconds)
    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _seconds: restore()))
    host.script = [method]
    fetch_data(args, NOTHING)
    assert_fetched(args, folders)
    assert message in caplog.text and "trying again" in caplog.text
    assert host.asked[0] is None and all(host.asked[1:])  # it is resumed


# --- checksums -------------------------------------------------------------------------------------------------------


def test_a_wrong_checksum(args, host):
    args.dataset_sha256 = "0" * 64
    message = fail(args, leftovers=set())
    assert "0" * 64 in message and "ask the organiser" in message and len(host.asked) == 1


@pytest.mark.parametrize("has_checksum", [True, False])
@pytest.mark.parametrize("title", ["Log in", "日本", "a\x1b[31m\nb", ""])
def test_a_web_page_instead_of_the_archive_is_named(args, host, has_checksum, title):
    host.content = f"<!DOCTYPE html>\n<html><title>{title}</title></html>".encode()
    args.dataset_sha256 = args.dataset_sha256 if has_checksum else None
    message = fail(args, leftovers=set())
    assert "answers with a web page" in message and "open the address in a browser" in message
    assert title not in ("Log in", "日本") or f"('{title}')" in message


def test_missing_checksum_is_reported_and_credentials_are_not_logged(args, host, folders, caplog):
    caplog.set_level(logging.DEBUG, "cotrain.data.download")
    caplog.set_level(logging.WARNING, "urllib3")  # as setup_logging does, with --debug too
    host.script = [Answer.break_off, partial(Answer.serve, num_bytes=1000), partial(Answer.reply, status=500)]
    args.dataset_url = host.url.replace("//", f"//user:{SECRET}@") + f"?token={SECRET}#{SECRET}"
    args.dataset_sha256 = None
    fetch_data(args, NOTHING)
    assert_fetched(args, folders)
    query = f"?token={SECRET}"
    assert host.requests == [f"/data.tar.gz{query}"] * 4
    assert f"{host.url}: " in caplog.text and "trying again" in caplog.text and SECRET not in caplog.text
    assert "Could not verify the archive" in caplog.text and file_sha256(host.archive) in caplog.text


# --- existing data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["dataset", "tokenizer"])
def test_existing_data_is_kept(args, host, folders, kept):
    fetch_data(args, NOTHING)
    shutil.rmtree(args.tokenizer_path if kept == "dataset" else args.dataset_path)
    mark = Path(args.dataset_path).parent / kept / "mark.json"
    mark.touch()
    fetch_data(args, NOTHING)
    mark.unlink()
    assert_fetched(args, folders)


@pytest.mark.parametrize("flag", ["dataset_path", "tokenizer_path"])
def test_occupied_path_is_refused(args, host, flag):
    path = Path(getattr(args, flag))
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("years of work", encoding="utf-8")
    message = fail(args, leftovers={path.name})
    assert f"--{flag}" in message and "choose another path" in message
    assert contents(path) == {"thesis.txt": b"years of work"} and host.requests == []


# --- archives of strangers ------------------------------------------------------------------------------------------


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
    entry(f"{DATASET}/manifest.json", manifest()),
    entry(f"{DATASET}/dataset_dict.json", b"{}"),
    entry(f"{TOKENIZER}/tokenizer_config.json", b"{}"),
    entry(f"{DATASET}/train/data-0.arrow", SAMPLES),
    entry(f"{DATASET}/validation/data-0.arrow", SAMPLE),
)
ARROW = f"{DATASET}/train/data.arrow"
NEITHER = "neither a file nor a folder"
FOREIGN = "not part of the prepared data"
DAMAGED = "damaged or not a .tar.gz file"
LIMITS = {"MIN_LIMIT": 4 * 10**6, "MAX_MEMBERS": 50, "MAX_UNPACKED": 4e6, "MAX_TOKENIZER_FILE": 10**6}


def besides(*bad: tuple[tarfile.TarInfo, bytes]) -> Callable[[bytes], bytes]:
    return lambda _: pack(*GOOD, *bad)


def bad(**attributes: object) -> Callable[[bytes], bytes]:
    return besides(entry(ARROW, **attributes))


def without(name: str) -> Callable[[bytes], bytes]:
    return lambda _: pack(*(file for file in GOOD if not file[0].name.endswith(name)))


def samples(train: bytes, **changes: object) -> Callable[[bytes], bytes]:
    files = (entry(f"{DATASET}/manifest.json", manifest(**changes)), *GOOD[1:3], entry(ARROW, train), GOOD[-1])
    return lambda _: pack(*files)


def with_offsets(offset: int) -> bytes:
    """Return a file whose second sample reaches beyond the values."""
    good, bad = struct.pack("<3i", 0, 2, 4), struct.pack("<3i", 0, 2, offset)
    assert good in SAMPLES
    return SAMPLES.replace(good, bad)  # in both columns


IMAGE = pa.array([{"bytes": None, "path": "webhdfs://127.0.0.1:9/secret"}] * 2)
IMAGES = {"huggingface": '{"info": {"features": {"input_ids": {"_type": "Image"}}}}'}
NO_SAMPLES = "its samples are damaged ("
PAIRS = [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *[
            (besides(entry(name, b"x")), FOREIGN)
            for name in (
                "../evil.json", "/evil.json", "evil.json", f"/{ARROW}", f"{DATASET}/../../../evil.json",
                f"{DATASET}/train/../../evil.json", f"{DATASET}/.hidden.json", f"{DATASET}/train/deep/data.arrow",
                f"{TOKENIZER}/..", f"{TOKENIZER}/tokenization.py", f"{TOKENIZER}/a\nb.json", f"{TOKENIZER}/a.json\n",
                f"{TOKENIZER}/\x1b[31m.json", f"{TOKENIZER}/{'n' * 300}/x.json",  # the last in a separate header
            )
        ],
        (bad(type=tarfile.SYMTYPE, linkname="/etc/passwd"), NEITHER),
        (besides(entry(f"{DATASET}/train", type=tarfile.SYMTYPE, linkname="../../..")), NEITHER),
        (bad(type=tarfile.LNKTYPE, linkname=f"{DATASET}/manifest.json"), NEITHER),
        (bad(type=tarfile.CHRTYPE, devmajor=1, devminor=3), NEITHER),
        (bad(type=tarfile.FIFOTYPE), NEITHER),
        (bad(content=b"x" * 600, type=tarfile.GNUTYPE_SPARSE), NEITHER),
        (bad(pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": "9" * 12}), "an entry in it has an invalid"),
        (bad(pax_headers={"comment": "x" * 10**6}), "a header in it has an invalid size"),
        (bad(pax_headers={"size": str(10**15)}), "unpacks to more than"),
        (bad(pax_headers={"size": "-1024"}), "an entry in it has an invalid size"),
        # Refused at the header with too large a size, in any order of the entries.
        (bad(content=bytes(6 * 10**6)), "unpacks to more than 4 MB"),
        (besides(*[entry(ARROW, bytes(12 * 10**5))] * 4), "unpacks to more than 4 MB"),
        # 16:1, as an archive of 20 GB that unpacked to 400
        (bad(content=random.Random(0).randbytes(300_000) + bytes(4_500_000)), "unpacks to more than 4 MB"),
        (besides(*(entry(f"{DATASET}/train/{number}.json") for number in range(51))), "50 files"),
        (besides(entry(f"{TOKENIZER}/tokenizer.json", bytes(10**6 + 1))), "tokenizer.json' in it has more than 1 MB"),
        (without("manifest.json"), "it lacks data/tokenized/manifest.json"),
        (without("tokenizer_config.json"), "it lacks data/tokenizer/tokenizer_config.json"),
        (lambda _: b"Sign in to download", DAMAGED),
        (lambda _: b"", DAMAGED),
        (lambda _: gzip.compress(b"not a tar" * 1000), DAMAGED),
        (lambda content: content[: len(content) // 2], DAMAGED),
        (lambda content: content[:-4], DAMAGED),
        (lambda content: content[:150_000] + b"\0\0" + content[150_002:], DAMAGED),
        (lambda content: content[:-8] + b"abcd" + content[-4:], DAMAGED),
        (samples(arrow(IMAGE, attention_mask=[[1], [1]])), "the columns have other types"),
        (samples(arrow(pa.array([[1], [2]], pa.list_(pa.int64())))), "the columns have other types"),
        (samples(arrow([[1, 2]])), "1 samples"),
        (samples(with_offsets(3000)), "Length spanned by list offsets"),
        (samples(with_offsets(2**30)), "Length spanned by list offsets"),
        (samples(with_offsets(-1)), "offset"),
        (samples(arrow([[1, 2], [3, 10]]), vocab_size=10), "input_ids must be from 0 to 9"),
        (samples(arrow([[1, 2], [3, -1]])), "input_ids must be from 0"),
        (samples(arrow([[1, 2], None], attention_mask=[[1, 1], [1]])), "lengths must be"),
        (samples(arrow([[1, 2], [None, 1]])), "input_ids must be"),
        (samples(arrow(PAIRS, attention_mask=[[1, 1], [1]])), "attention_mask have other lengths"),
        (samples(arrow(PAIRS, attention_mask=[[1, 1], [1, 2]])), "attention_mask must be from 0 to 1"),
        (samples(arrow([[1, 2], []])), "lengths must be from 1 to 1000"),
        (samples(SAMPLES, max_seq_length=1), "lengths must be from 1 to 1"),
        (samples(SAMPLES, vocab_size="many"), NO_SAMPLES),
        (samples(SAMPLES, objective="x"), NO_SAMPLES),
        (samples(SAMPLES, splits=[]), NO_SAMPLES),
        (samples(SAMPLES[:-200]), NO_SAMPLES),
        (samples(b"x"), NO_SAMPLES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_archive_is_refused(args, host, tmp_path, monkeypatch, content, reason):
    for name, value in LIMITS.items():
        monkeypatch.setattr(archive, name, value)
    host.content, args.dataset_sha256 = content(host.content), None
    message = fail(args, leftovers=set())
    assert reason in message and message.endswith("; ask the organiser for the address of that archive")
    assert (NO_SAMPLES in message) == content.__qualname__.startswith("samples")
    assert os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize("name", [DATASET, "data/albert_tokenized_wikitext"])  # the second is of older versions
@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_manually_packed_archives(args, host, format, name):
    folder = entry(f"./{name}", type=tarfile.DIRTYPE, mode=0)
    good = [entry(info.name.replace(DATASET, name), content) for info, content in GOOD]
    host.content = pack(folder, *good, entry(f"./{TOKENIZER}/vocab.txt", b"a", mode=0o6777), format=format)
    args.dataset_sha256 = None
    fetch_data(args, NOTHING)
    assert (Path(args.tokenizer_path) / "vocab.txt").stat().st_mode & 0o7111 == 0


def test_nothing_beside_the_samples_is_believed(args, host, tmp_path):
    elsewhere = tmp_path / "private.arrow"
    elsewhere.write_bytes(arrow([[7]]))
    state = '{"_data_files": [{"filename": "%"}], "_split": "validation", "_fingerprint": "x"}'
    features = '{"features": {"input_ids": {"_type": "Image"}, "attention_mask": {"_type": "Image"}}}'
    host.content, args.dataset_sha256 = pack(
        *GOOD[:3],
        entry(ARROW, arrow([[1, 2], [3, 4]], metadata=IMAGES)),
        GOOD[-1],
        entry(f"{DATASET}/validation/state.json", state.replace("%", str(elsewhere)).encode()),
        entry(f"{DATASET}/validation/dataset_info.json", features.encode()),
    ), None  # fmt: skip
    fetch_data(args, NOTHING)
    train, validation = (load_split(args.dataset_path, split) for split in SPLITS)
    assert validation[0] == {"input_ids": [5, 6], "attention_mask": [1, 1]}
    assert [sample["input_ids"] for sample in train] == [[1, 2], [3, 4]]
    assert train.features.arrow_schema.remove_metadata() == SCHEMAS["clm"]


# --- the disk --------------------------------------------------------------------------------------------------------


def test_the_disk_is_full_while_unpacking(args, host, folders, monkeypatch):
    def fill(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "copyfileobj", fill)
        with pytest.raises(OSError, match="No space left") as error_info:
            fetch_data(args, NOTHING)
    folder = Path(args.dataset_path).parent
    assert describe(error_info.value) == f"{folder}: No space left on device"
    assert set(os.listdir(folder)) - {".dataset.lock"} == PARTIAL
    fetch_data(args, NOTHING)
    assert_fetched(args, folders)
    assert host.asked == [None, f"bytes={len(host.content)}-"]  # the downloaded archive is still valid


@pytest.mark.parametrize("left", [0, 1])
def test_insufficient_disk_space_is_detected_in_advance(args, host, monkeypatch, left):
    """`left`: number of checks that find enough space: before the download, before each file is unpacked."""
    free = [10**9] * left
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free.pop() if free else 10**5))
    assert "free some space or choose another folder" in fail(args, leftovers=PARTIAL if left else set())


# --- processes -------------------------------------------------------------------------------------------------------


def test_two_at_once(args, host, folders, caplog):
    caplog.set_level(logging.INFO, "cotrain.data.download")
    host.script = [Answer.stall]
    with ThreadPoolExecutor(2) as pool:
        downloads = [pool.submit(fetch_data, args, NOTHING)]
        wait_until(lambda: host.asked, 120, "the first begins to download")
        downloads.append(pool.submit(fetch_data, args, NOTHING))
        wait_until(lambda: "Another process is downloading the data; waiting" in caplog.text, 60, "the second waits")
        host.closing.set()  # ends the stall: the first continues
        for download in downloads:
            download.result(60)
    assert_fetched(args, folders)
    assert host.asked == [None, REST]


def test_stopped_while_downloading(args, host, folders, monkeypatch):
    checks = iter([None] * 3)  # one before the transfer, one for each block

    def stop(*_: object) -> None:
        if next(checks, "stop") is not None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fetch, "READ_BYTES", 100_000)
        patch.setattr(fetch, "check_space", stop)
        fetch_data(args, NOTHING)
    partial_file = Path(args.dataset_path).parent / ".dataset.download"
    size = partial_file.stat().st_size
    fetch_data(args, NOTHING)
    assert_fetched(args, folders)
    assert 0 < size < len(host.content) and host.asked == [None, f"bytes={size}-"]
