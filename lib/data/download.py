"""Download of the prepared data from a web server: download, verify, and unpack the archive.

If the archive's SHA-256 is known, an interrupted transfer resumes where it stopped, also after the script was stopped
or killed. The partial archive is kept under a hidden name beside the dataset until it is unpacked.
"""

import contextlib
import http.client
import logging
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from urllib3.exceptions import InvalidHeader, MaxRetryError
from urllib3.util import Retry

from arguments import DatasetArguments
from lib.common.atomic_files import check_target, make_parent, new_folder
from lib.common.errors import TemporaryError, UserError
from lib.common.hosts import is_on_internet
from lib.data.archive import DATASET, TOKENIZER, ArchiveError, check_space, file_sha256, unpack_archive

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 30.0  # seconds; READ_TIMEOUT is between two reads, not for the whole response
MIN_SPEED, SPEED_WINDOW = 1000, 60.0  # bytes per second over this many seconds; a slower transfer is interrupted
BLOCK = 2**20
# Six attempts in a row without new bytes, with pauses of 0, 2, 4, 8 and 16 seconds, or the pause the server requests.
RETRY_POLICY = Retry(total=5, backoff_factor=1, backoff_jitter=1, retry_after_max=60)
MAX_TRIES = 100  # in total, even if each attempt receives some bytes
TEMPORARY_TROUBLE = {408, 425, 429, 500, 502, 503, 504}
NOT_PUBLISHED = {403, 404, 410}  # S3 answers 403 for a missing file

# The file that marks a folder as complete, and the file with the SHA-256 of the archive that a dataset is from.
_MARKS = {DATASET: "manifest.json", TOKENIZER: "tokenizer_config.json"}
RECEIPT = "archive.sha256"


class TransientError(Exception):
    """A transfer failed temporarily and may be retried. The message never contains the whole address.

    :param response: the response, which may have a Retry-After header
    """

    def __init__(self, reason: str, response: urllib3.BaseHTTPResponse | None = None):
        super().__init__(reason)
        self.response = response


def fetch_data(args: DatasetArguments, disable_tqdm: bool = False) -> None:
    """Download the dataset and the tokenizer from --dataset_url unless they exist. Existing folders are not changed.

    :param disable_tqdm: show no progress bar; without a terminal there is none either
    :raises UserError: if they are not available
    """
    if args.dataset_url is None or not _find_missing(args):
        return
    dataset_path = Path(args.dataset_path).resolve()
    make_parent(dataset_path)
    lock_path = _beside(dataset_path, "lock")
    try:
        with _one_at_a_time(FileLock(lock_path)):
            if missing := _find_missing(args):
                _fetch(args, missing, _beside(dataset_path, "download"), disable_tqdm)
            lock_path.unlink(missing_ok=True)  # later processes find the data
    except OSError as error:
        error.filename = error.filename or str(dataset_path.parent)  # a failed write does not say where
        raise


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _find_missing(args: DatasetArguments) -> dict[str, Path]:
    """Return the folders to unpack: name in the archive -> folder, the dataset first.

    :raises UserError: if a path is occupied by something else, or the existing data is from another archive
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
def _one_at_a_time(lock: FileLock) -> Iterator[None]:
    """Hold a lock that lets one process of this machine download at a time. The lock ends with its process."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("Another process is downloading the data; waiting for it")
        lock.acquire(poll_interval=0.5)
    try:
        yield
    finally:
        lock.release()


def _fetch(args: DatasetArguments, missing: dict[str, Path], path: Path, disable_tqdm: bool) -> None:
    """Download the archive to `path`, verify it, and unpack the missing folders."""
    address = public_address(args.dataset_url)
    with requests.Session() as session:
        session.max_redirects = 10
        session.hooks["response"].append(partial(_check_redirect, session))
        expected = args.dataset_sha256 or _fetch_checksum(session, args.dataset_url)
        digest = Download(session, args.dataset_url, path, expected, disable_tqdm).complete()
    if expected is None:
        logger.warning(
            f"Could not verify the archive: there is no .sha256 file next to {address}. Compare its SHA-256 "
            f"with the organiser's and pass it as --dataset_sha256: {digest}"
        )
    try:
        _unpack(path, missing, digest)
    except ArchiveError as error:
        path.unlink()
        raise UserError(
            f"--dataset_url: {address} is not an archive from tokenize_wikitext103.py --archive: {error}; "
            "ask the organiser for the address of that archive"
        ) from None
    path.unlink()
    logger.info(f"The data is in {' and '.join(map(str, missing.values()))}")


def _unpack(path: Path, missing: dict[str, Path], digest: str) -> None:
    logger.info("Unpacking")
    with contextlib.ExitStack() as stack:
        # The first folder entered is completed last: a complete dataset always has its tokenizer.
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
    """Return an address without query, user name and password, which may be credentials."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _fetch_checksum(session: requests.Session, url: str) -> str | None:
    """Return the checksum in the .sha256 file (of `sha256sum`) beside the archive; None if there is none."""
    parts = urlsplit(url)
    url = parts._replace(path=f"{parts.path}.sha256", fragment="").geturl()
    return _retry(url, lambda: _fetch_checksum_once(session, url))


def _fetch_checksum_once(session: requests.Session, url: str) -> str | None:
    with _get(session, url, {}) as response:
        if response.status_code in NOT_PUBLISHED:
            return None
        _check_status(response, url, {200})
        text = response.raw.read(1000, decode_content=True).decode(errors="replace")
        match = re.match(r"([0-9a-fA-F]{64})\b", text)
        return match and match[1].lower()  # some hosts answer any request with a web page


def _check_redirect(session: requests.Session, response: requests.Response, **_) -> None:
    """Refuse a redirect from the internet into this machine or its network.

    A stranger may have chosen the address of the data. Called for each response, before a redirect is followed.

    :raises UserError: if it leads there
    """
    if (target := session.get_redirect_target(response)) is None:
        return
    host = urlsplit(urljoin(response.url, target)).hostname or ""
    if is_on_internet(urlsplit(response.url).hostname) and not is_on_internet(host):
        raise UserError(
            f"--dataset_url: {public_address(response.url)} redirects to {host}, which is not on the internet: refused"
        )


@contextlib.contextmanager
def _get(session: requests.Session, url: str, headers: dict[str, str]) -> Iterator[requests.Response]:
    """Send a GET request and yield the response, whose body is not read yet.

    The messages of requests and urllib3 quote the whole address, so no error message contains them.

    :raises TransientError: for network errors, also in the body of the `with` statement, and temporary status codes
    :raises UserError: if the request is invalid
    """
    try:
        timeout = (CONNECT_TIMEOUT, READ_TIMEOUT)
        # No content encoding: offsets and checksum refer to the bytes of the file on the server.
        headers = {"Accept-Encoding": "identity", **headers}
        with session.get(url, headers=headers, stream=True, timeout=timeout) as response:
            if response.status_code in TEMPORARY_TROUBLE:
                raise TransientError(f"the server answers with status {response.status_code}", response.raw)
            yield response
    except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
        raise TransientError(_root_cause(error)) from None
    except requests.RequestException as error:
        raise UserError(
            f"--dataset_url: {public_address(url)} cannot be requested ({type(error).__name__}); check the address"
        ) from None


def _root_cause(error: BaseException) -> str:
    while cause := error.__cause__ or error.__context__:
        error = cause
    if isinstance(error, TimeoutError):
        return "the server does not respond"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection was lost"
    if isinstance(error, OSError | http.client.HTTPException):
        return getattr(error, "strerror", None) or str(error)
    return type(error).__name__


def _check_status(response: requests.Response, url: str, expected: set[int]) -> None:
    if response.status_code not in expected:
        raise UserError(
            f"--dataset_url: {public_address(url)} answers with status {response.status_code}; check the "
            "address and that it is public"
        )


def _retry(url: str, attempt: Callable[[], T], received: Callable[[], int] = lambda: 0) -> T:
    """Call `attempt` until it raises no `TransientError`, with growing pauses.

    :param received: returns the number of bytes received so far; an attempt that adds bytes resets the pause
    :raises TemporaryError: after too many attempts
    """
    retries, most = RETRY_POLICY, received()
    for _ in range(MAX_TRIES):
        try:
            return attempt()
        except TransientError as transient:
            error = transient
        if (size := received()) > most:  # no reset if each attempt fails at the same offset
            retries, most = RETRY_POLICY, size
        try:
            retries = retries.increment("GET", error=error)
        except MaxRetryError:
            break
        logger.warning(f"{public_address(url)}: {error}; trying again")
        try:
            retries.sleep(error.response)
        except InvalidHeader:
            retries.sleep()
    raise TemporaryError(f"--dataset_url: {public_address(url)} cannot be downloaded ({error}); try again later")


class Download:
    """Download of an archive to a file, which is resumed if its SHA-256 is known.

    :param path: the target file; a partial one stays there
    :param expected: SHA-256; None: any
    """

    def __init__(
        self, session: requests.Session, url: str, path: Path, expected: str | None, disable_tqdm: bool = False
    ):
        self.session, self.url, self.path, self.expected = session, url, path, expected
        self.disable_tqdm = disable_tqdm or None  # None: disabled unless the output is a terminal
        self.is_resumed = False

    def complete(self) -> str:
        """Download the remaining bytes and verify the checksum.

        :returns: SHA-256 of the archive
        :raises UserError: if the SHA-256 differs from the expected one, or the server does not provide the file
        """
        digest = self._receive_all()
        if self.is_resumed and digest != self.expected:
            logger.warning("The resumed download does not match the SHA-256; downloading the whole archive again")
            self.path.unlink()
            digest = self._receive_all()
        if self.expected not in (None, digest):
            self.path.unlink()
            raise UserError(
                f"--dataset_url: {public_address(self.url)} has SHA-256 {digest}, but --dataset_sha256 or the .sha256 "
                f"file beside it says {self.expected}; ask the organiser which is right"
            )
        return digest

    def _receive_all(self) -> str:
        _retry(self.url, self._receive, received=self._count)
        return file_sha256(self.path)

    def _count(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _receive(self) -> None:
        """Try once to receive the remaining bytes.

        :raises TransientError: if bytes are still missing
        """
        start = self._count() if self.expected is not None else 0
        with _get(self.session, self.url, {"Range": f"bytes={start}-"} if start else {}) as response:
            self.is_resumed = bool(start) and response.status_code in (206, 416)
            if self.is_resumed and response.status_code == 416:
                return  # nothing is missing, or it is another file: the SHA-256 shows which
            _check_status(response, self.url, {200, 206} if start else {200})
            start = start if self.is_resumed else 0
            missing = response.raw.length_remaining
            verb = f"Resuming at {start / 1e6:,.1f} MB:" if start else "Downloading"
            size = "" if missing is None else f", {(start + missing) / 1e6:,.1f} MB"
            logger.info(f"{verb} {public_address(self.url)}{size}")
            check_space(self.path.parent, missing or 0)
            self._write(response.raw, start, missing)

    def _write(self, body: urllib3.BaseHTTPResponse, start: int, missing: int | None) -> None:
        size = None if missing is None else start + missing
        with (
            open(self.path, "ab" if start else "wb") as file,
            tqdm(
                desc="Downloading the data", initial=start, total=size, unit="B", unit_scale=True,
                disable=self.disable_tqdm,
            ) as progress,
        ):  # fmt: skip
            since, received = time.monotonic(), 0
            # Unlike `read`, `read1` does not wait for a full block: no received bytes are lost on an interruption.
            while block := body.read1(BLOCK, decode_content=False):
                file.write(block)
                progress.update(len(block))
                received += len(block)
                if (now := time.monotonic()) - since > SPEED_WINDOW:
                    if received < MIN_SPEED * SPEED_WINDOW:
                        raise TransientError(f"fewer than {MIN_SPEED:,} bytes a second")
                    check_space(self.path.parent, 0)  # not every server sends the size
                    if progress.disable:
                        logger.info(f"Downloaded {file.tell() / 1e6:,.0f} MB")
                    since, received = now, 0
