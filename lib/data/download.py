"""The prepared data from a web server: downloaded, checked, and unpacked to where trainers look for it.

A transfer that breaks off goes on where it stopped, even after the script was stopped or killed. What has arrived of
the archive is kept under a hidden name beside the dataset until it is unpacked.
"""

import contextlib
import http.client
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import requests
import urllib3
from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from urllib3.exceptions import InvalidHeader, MaxRetryError
from urllib3.util import Retry

from arguments import DatasetArguments
from lib.common.atomic_files import check_target, make_parent, new_file, new_folder
from lib.common.errors import UserError
from lib.data.archive import DATASET, TOKENIZER, ArchiveError, check_space, file_sha256, unpack_archive

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 30.0  # seconds; the second until the next bytes, not until the last
MIN_SPEED, SPEED_WINDOW = 1000, 60.0  # bytes a second, over so many seconds; a line that is slower counts as broken
LOCK_TIMEOUT = 6 * 3600.0
BLOCK = 2**20
# Tries in a row that bring nothing: 6, with pauses of 0, 2, 4, 8 and 16 seconds, or what the server asks for.
PATIENCE = Retry(total=5, backoff_factor=1, backoff_jitter=1, retry_after_max=60)
MAX_TRIES = 100  # in all, even if each brings some bytes
TEMPORARY_TROUBLE = {408, 425, 429, 500, 502, 503, 504}
NOT_PUBLISHED = {403, 404, 410}  # S3 says 403 of a file that is not there

# The file that tells that a folder is complete, and the name of the one that tells which archive it is from.
_MARKS = {DATASET: "manifest.json", TOKENIZER: "tokenizer_config.json"}
RECEIPT = "archive.sha256"


class Interrupted(Exception):
    """A transfer that may succeed when it is tried again. The message never contains the whole address.

    :param response: of a server that may have said when
    """

    def __init__(self, reason: str, response: urllib3.BaseHTTPResponse | None = None):
        super().__init__(reason)
        self.response = response


def fetch_data(args: DatasetArguments, disable_tqdm: bool = False) -> None:
    """Get the dataset and the tokenizer from --dataset_url, unless they are there. What is there stays as it is.

    :param disable_tqdm: no progress bar; there is none either where the output is not a terminal
    :raises UserError: if they cannot be had
    """
    if args.dataset_url is None or not _find_missing(args):
        return
    dataset_path = Path(args.dataset_path).resolve()
    make_parent(dataset_path)
    lock_path = _beside(dataset_path, "lock")
    try:
        with _one_at_a_time(lock_path):
            if missing := _find_missing(args):
                _fetch(args, missing, _beside(dataset_path, "download"), disable_tqdm)
            lock_path.unlink(missing_ok=True)  # whoever comes now finds the data
    except OSError as error:
        error.filename = error.filename or str(dataset_path.parent)  # a failed write does not say where
        raise


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _find_missing(args: DatasetArguments) -> dict[str, Path]:
    """What is to be unpacked: name in the archive -> folder, the dataset first.

    :raises UserError: if something else is in the way, or the data is there but from another archive
    """
    folders = {DATASET: ("--dataset_path", args.dataset_path), TOKENIZER: ("--tokenizer_path", args.tokenizer_path)}
    missing = {}
    for name, (flag, folder) in folders.items():
        if not (Path(folder) / _MARKS[name]).is_file():
            check_target(Path(folder), flag, replaceable=(_MARKS[name],))
            missing[name] = Path(folder)
    receipt = Path(args.dataset_path) / RECEIPT
    if DATASET not in missing and args.dataset_sha256 is not None and receipt.is_file():
        digest = receipt.read_text().strip()
        if digest != args.dataset_sha256:
            raise UserError(
                f"--dataset_sha256: the data in '{args.dataset_path}' is from another archive ({digest}); remove it "
                f"and '{args.tokenizer_path}' to download this one, or pass other paths"
            )
    return missing


@contextlib.contextmanager
def _one_at_a_time(lock_path: Path) -> Iterator[None]:
    """Let one process of this machine download. A lock ends with its process, however that ends."""
    lock = FileLock(lock_path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("Another process downloads the data; waiting for it")
        try:
            lock.acquire(timeout=LOCK_TIMEOUT, poll_interval=0.5)
        except Timeout:
            raise UserError(
                f"--dataset_url: another process has been downloading for {LOCK_TIMEOUT / 3600:.0f} hours "
                f"(it has locked '{lock_path}'); end it"
            ) from None
    try:
        yield
    finally:
        lock.release()


def _fetch(args: DatasetArguments, missing: dict[str, Path], path: Path, disable_tqdm: bool) -> None:
    """Download the archive to `path`, check it, and unpack what is missing."""
    address = public_address(args.dataset_url)
    with requests.Session() as session:
        session.max_redirects = 10
        expected = args.dataset_sha256 or _ask_for_sha256(session, args.dataset_url)
        download = Download(session, args.dataset_url, path, disable_tqdm)
        digest = download.complete(expected)
    if expected is None:
        logger.warning(
            f"Nothing tells whether this is the right archive: {address} has no .sha256 file beside it. Compare with "
            f"what the organiser says, and pass it as --dataset_sha256: {digest}"
        )
    try:
        _unpack(path, missing, digest)
    except ArchiveError as error:
        download.discard()
        raise UserError(
            f"--dataset_url: {address} is not an archive that tokenize_wikitext103.py --archive wrote: {error}"
        ) from None
    download.discard()
    logger.info(f"The data is in {' and '.join(map(str, missing.values()))}")


def _unpack(path: Path, missing: dict[str, Path], digest: str) -> None:
    logger.info("Unpacking")
    with contextlib.ExitStack() as stack:
        # The first that is entered is the last to be complete: a dataset never lacks its tokenizer.
        folders = {
            name: stack.enter_context(new_folder(folder, "--dataset_url", replaceable=(_MARKS[name],)))
            for name, folder in missing.items()
        }
        unpack_archive(path, folders)
        for name, folder in folders.items():
            if not (folder / _MARKS[name]).is_file():
                raise ArchiveError(f"it lacks {name}/{_MARKS[name]}")
        if DATASET in folders:
            (folders[DATASET] / RECEIPT).write_text(f"{digest}\n")


def public_address(url: str) -> str:
    """An address as it may be shown: a query, a user name or a password may be what lets one in."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _ask_for_sha256(session: requests.Session, url: str) -> str | None:
    """What the file beside the archive says, as `sha256sum` writes it; None if there is none."""
    parts = urlsplit(url)
    url = parts._replace(path=f"{parts.path}.sha256", fragment="").geturl()
    return _retry(url, lambda: _ask_once_for_sha256(session, url))


def _ask_once_for_sha256(session: requests.Session, url: str) -> str | None:
    with _ask(session, url, {}) as response:
        if response.status_code in NOT_PUBLISHED:
            return None
        _check_status(response, url, {200})
        text = response.raw.read(1000, decode_content=True).decode(errors="replace")
        match = re.match(r"([0-9a-fA-F]{64})\b", text)
        return match and match[1].lower()  # some hosts answer with a web page to anything


@contextlib.contextmanager
def _ask(session: requests.Session, url: str, headers: dict[str, str]) -> Iterator[requests.Response]:
    """The answer to a GET, its body still to be read. Trouble on the way, also in the block, becomes Interrupted.

    The messages of requests and urllib3 quote the whole address: none of them gets into ours.
    """
    try:
        timeout = (CONNECT_TIMEOUT, READ_TIMEOUT)
        # Bytes as they are on the server, or offsets and checksum would be those of something else.
        headers = {"Accept-Encoding": "identity", **headers}
        with session.get(url, headers=headers, stream=True, timeout=timeout) as response:
            if response.status_code in TEMPORARY_TROUBLE:
                raise Interrupted(f"the server answers with status {response.status_code}", response.raw)
            yield response
    except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
        raise Interrupted(_root_cause(error)) from None
    except requests.RequestException as error:
        raise UserError(
            f"--dataset_url: {public_address(url)} cannot be asked for ({type(error).__name__}); check the address"
        ) from None


def _root_cause(error: BaseException) -> str:
    while cause := error.__cause__ or error.__context__:
        error = cause
    if isinstance(error, TimeoutError):
        return "the server is silent"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection broke off"
    if isinstance(error, OSError | http.client.HTTPException):
        return getattr(error, "strerror", None) or str(error)
    return type(error).__name__


def _check_status(response: requests.Response, url: str, expected: set[int]) -> None:
    if response.status_code not in expected:
        raise UserError(
            f"--dataset_url: {public_address(url)} answers with status {response.status_code}; check the address and "
            f"that it is open to everybody"
        )


def _retry(url: str, attempt: Callable[[], T], received: Callable[[], int] = lambda: 0) -> T:
    """Call `attempt` until it is not interrupted, with longer and longer pauses.

    :param received: the bytes that are here; a try that adds some makes the next pause short again
    :raises UserError: if there were too many tries
    """
    patience, most = PATIENCE, received()
    for _ in range(MAX_TRIES):
        try:
            return attempt()
        except Interrupted as interruption:
            error = interruption
        if (size := received()) > most:  # not if it breaks at the same place each time
            patience, most = PATIENCE, size
        try:
            patience = patience.increment("GET", error=error)
        except MaxRetryError:
            break
        logger.warning(f"{public_address(url)}: {error}; trying again")
        try:
            patience.sleep(error.response)
        except InvalidHeader:
            patience.sleep()
    raise UserError(
        f"--dataset_url: {public_address(url)} cannot be downloaded ({error}); try again later, it goes on where it "
        f"stopped"
    )


@dataclass
class Origin:
    """What the bytes on disk are the beginning of, kept beside them: they are only completed from the same file.

    `address`: without its secrets, which may change from day to day; `validator`: an ETag or a date of modification,
    empty if the server gives none that can be relied on; `size`: of the whole file, None if the server does not tell
    """

    address: str
    validator: str
    size: int | None


class Download:
    """An archive on its way to a file.

    :param path: where to; it is there as long as the download is not complete, and until `discard` afterwards
    """

    def __init__(self, session: requests.Session, url: str, path: Path, disable_tqdm: bool = False):
        self.session, self.url, self.path = session, url, path
        self.origin_path = path.with_name(f"{path.name}.json")
        self.disable_tqdm = disable_tqdm or None  # None: where the output is not a terminal

    def complete(self, expected: str | None) -> str:
        """Download what is not there yet.

        :param expected: SHA-256
        :returns: SHA-256
        :raises UserError: if it is another than expected, or the server does not give the file
        """
        address = public_address(self.url)
        is_resumed = self._load()[1] > 0
        self._receive_all()
        digest = file_sha256(self.path)
        if is_resumed and expected not in (None, digest):
            logger.warning("What an earlier run has downloaded does not fit; downloading all of it again")
            self.discard()
            self._receive_all()
            digest = file_sha256(self.path)
        if expected not in (None, digest):
            self.discard()
            raise UserError(
                f"--dataset_url: {address} has SHA-256 {digest}, but --dataset_sha256 or the .sha256 file beside it "
                f"says {expected}; ask the organiser which is right"
            )
        return digest

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self.origin_path.unlink(missing_ok=True)

    def _load(self) -> tuple[Origin | None, int]:
        """What the file on disk is a part of and how much there is of it; None and 0 if that cannot be completed."""
        try:
            origin = Origin(**json.loads(self.origin_path.read_text()))
            size = self.path.stat().st_size
        except (FileNotFoundError, ValueError, TypeError):
            return None, 0
        if origin.address != public_address(self.url) or not origin.validator:
            return None, 0
        return (origin, size) if origin.size is None or size <= origin.size else (None, 0)

    def _receive_all(self) -> None:
        _retry(self.url, self._receive, received=lambda: self._load()[1])

    def _receive(self) -> None:
        """Try once to receive the rest.

        :raises Interrupted: if there is still something missing
        """
        origin, start = self._load()
        if origin is not None and start == origin.size:
            return
        # If-Range: send all of it if it is not the same file any more.
        headers = {"Range": f"bytes={start}-", "If-Range": origin.validator} if start else {}
        with _ask(self.session, self.url, headers) as response:
            if start and response.status_code in (206, 416) and not _continues(response, origin, start):
                self.discard()
                raise Interrupted("the file has changed", response.raw)
            _check_status(response, self.url, {200, 206} if start else {200})
            if response.status_code == 200:
                start = 0
                origin = Origin(public_address(self.url), _validator(response), response.raw.length_remaining)
                self.discard()
                with new_file(self.origin_path) as temporary:
                    temporary.write_text(json.dumps(asdict(origin)))
            self._log_start(start, origin.size)
            check_space(self.path.parent, (origin.size or start) - start)
            self._write(response.raw, start, origin.size)

    def _log_start(self, start: int, size: int | None) -> None:
        verb = f"Going on at {start / 1e6:,.1f} MB with" if start else "Downloading"
        total = "" if size is None else f", {size / 1e6:,.1f} MB"
        logger.info(f"{verb} {public_address(self.url)}{total}")

    def _write(self, body: urllib3.BaseHTTPResponse, start: int, size: int | None) -> None:
        with (
            open(self.path, "ab") as file,
            tqdm(
                desc="Downloading the data", initial=start, total=size, unit="B", unit_scale=True,
                disable=self.disable_tqdm,
            ) as progress,
        ):  # fmt: skip
            since, received = time.monotonic(), 0
            # Unlike `read`, `read1` does not wait until a block is full: what has come is not lost when it breaks off.
            while block := body.read1(BLOCK, decode_content=False):
                file.write(block)
                progress.update(len(block))
                received += len(block)
                if (now := time.monotonic()) - since > SPEED_WINDOW:
                    if received < MIN_SPEED * SPEED_WINDOW:
                        raise Interrupted(f"fewer than {MIN_SPEED:,} bytes a second")
                    check_space(self.path.parent, 0)  # not every server tells the size
                    if progress.disable:
                        logger.info(f"{file.tell() / 1e6:,.0f} MB of the data are here")
                    since, received = now, 0
            end = file.tell()
        if size is not None and end != size:
            raise Interrupted("the connection broke off")


def _validator(response: requests.Response) -> str:
    """What tells one version of a file from the next. A weak ETag does not promise that the bytes are the same."""
    etag = response.headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")


def _continues(response: requests.Response, origin: Origin, start: int) -> bool:
    """Whether an answer to a Range is the part that was asked for, of the same file. Not every server that knows Range
    knows If-Range."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if response.status_code != 206 or match is None or int(match[1]) != start:
        return False
    is_same = _validator(response) in ("", origin.validator)
    return is_same and (origin.size is None or match[2] in ("*", str(origin.size)))
