"""Download of the prepared data from a web server: download, verify, and unpack the archive or a shard.

With --dataset_sha256, an interrupted transfer resumes where it stopped, also after the script was stopped
or killed. The partial archive is kept under a hidden name beside the dataset until it is unpacked. Of a large archive,
a monitor receives the head alone if --dataset_head_sha256 is known.
"""

import contextlib
import logging
import math
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

import requests
import urllib3
from filelock import FileLock, Timeout
from urllib3.util import Retry

from cotrain.common.atomic_files import check_target, new_file, new_folder
from cotrain.common.errors import TemporaryError, UserError, first_line, require_writable
from cotrain.common.flags import format_size
from cotrain.common.hosts import MAX_DOWNLOAD_BYTES, GuardedAdapter
from cotrain.common.progress_bar import ProgressBar
from cotrain.common.stand_ins import find_stand_in
from cotrain.common.weights import weight_files
from cotrain.data.archive import (
    DATASET,
    LARGE,
    TOKENIZER,
    ArchiveError,
    check_space,
    file_sha256,
    unpack_archive,
    unpack_head,
)
from cotrain.data.archive_folders import (
    MARKS,
    RECEIPT,
    claim_folders,
    find_folders,
    find_foreign_archive,
    keep_in_use,
    public_address,
    write_receipt,
)
from cotrain.data.loading import check_dataset, check_samples, open_samples
from cotrain.data.manifest import Manifest, Shard
from cotrain.options import Adopted, DataOptions, ModelOptions
from cotrain.settings import BASE_FOLDER

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT, SILENCE_TIMEOUT = 10.0, 30.0  # seconds; the second between two reads, not for the whole response
MIN_SPEED, SPEED_WINDOW = 1000, 60.0  # bytes per second over this many seconds; a slower transfer is interrupted
READ_BYTES = 2**20
FIRST_LOOK = 4 * 2**20  # bytes of a large archive after which to look for its head; each later look is at four times
PAUSES = (0, 2, 4, 8, 16)  # seconds between attempts in a row without new bytes
MAX_RETRY_AFTER = 900.0  # seconds that a server may ask for before the next attempt
MAX_TRIES = 100  # in total, even if each attempt receives some bytes
TEMPORARY_TROUBLE = {408, 425, 429, 500, 502, 503, 504}


class HeadUnpacked(Exception):
    """The head of the archive is unpacked, and nothing else is needed."""


class TransientError(Exception):
    """A transfer failed temporarily and may be retried. The message never contains the whole address.

    :param seconds: that the server asks to wait before the next attempt
    """

    def __init__(self, message: str, seconds: float = 0.0):
        super().__init__(message)
        self.seconds = seconds


def fetch_data(args: ModelOptions, adopted: Adopted, disable_tqdm: bool = False, has_weights: bool = False) -> None:
    """Download dataset, tokenizer and BASE_FOLDER from --dataset_url unless they exist. Folders are not changed.

    Folders of another archive are moved aside, see archive_folders.py.

    :param args: without a path for the dataset, which a monitor does not need, only the tokenizer is unpacked
    :param has_weights: whether the weights in BASE_FOLDER are needed
    :raises UserError: if they are not available
    """
    if args.dataset_url is None:
        return
    places = find_folders(args)
    folder = next(iter(places.values()))[1].resolve()
    if _find_missing(args, has_weights) or any(find_foreign_archive(path, args) for _, path in places.values()):
        require_writable(folder.parent, f"--{next(iter(places.values()))[0]}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            _fetch_alone(args, adopted, folder, disable_tqdm, has_weights)
        except OSError as error:
            error.filename = error.filename or str(folder.parent)  # a failed write does not say where
            raise
    if DATASET in places:
        keep_in_use(places[DATASET][1])
    elif not (places[TOKENIZER][1] / RECEIPT).is_file():  # a trainer compares the tokenizer with the dataset
        what = f"'{places[TOKENIZER][1]}' does not say from which archive it is"
        logger.warning(f"{what}: if it is not that of --dataset_url, stop and remove it")


def _fetch_alone(args: ModelOptions, adopted: Adopted, folder: Path, disable_tqdm: bool, has_weights: bool) -> None:
    """Download what is missing, while no other process does. `folder`: that of the lock and of the partial archive."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))  # ends with its process
    try:
        acquired = lock.acquire(timeout=0)
    except Timeout:
        logger.info("Another process is downloading the data; waiting for it")
        acquired = lock.acquire(poll_interval=0.5)
    with acquired:
        claim_folders(args)
        if missing := _find_missing(args, has_weights):
            is_head = args.dataset_head_sha256 is not None and not (
                DATASET in missing or (BASE_FOLDER in missing and has_weights)
            )
            _fetch(args, adopted, missing, folder.with_name(f".{folder.name}.download"), disable_tqdm, is_head)
        Path(lock.lock_file).unlink(missing_ok=True)  # later processes find the data


def _lacks_weights(folder: Path) -> bool:
    """Whether a folder has the head of an archive with weights, without these."""
    is_unpacked = all((folder / name).is_file() for name in (RECEIPT, MARKS[BASE_FOLDER]))
    return is_unpacked and not all((folder / name).is_file() for name in weight_files(folder))


def _find_missing(args: ModelOptions, has_weights: bool) -> dict[str, Path]:
    """Return the folders to unpack: name in the archive -> folder, the dataset first.

    :raises UserError: if a path is occupied by something else
    """
    missing = {}
    for name, (flag, folder) in find_folders(args).items():
        is_lacking = has_weights and name == BASE_FOLDER and _lacks_weights(folder)
        if is_lacking or not (folder / MARKS[name]).is_file():
            check_target(folder, f"--{flag}", is_lacking, replaceable=(MARKS[name],))
            missing[name] = folder
    return missing


def _fetch(
    args: ModelOptions, adopted: Adopted, missing: dict[str, Path], path: Path, disable_tqdm: bool, is_head: bool
) -> None:
    """Download the archive to `path`, verify it, and unpack the missing folders; `is_head`: the head is enough."""

    def check() -> None:
        for name, folder in folders.items():
            if not (folder / MARKS[name]).is_file():
                raise ArchiveError(f"it lacks {name}/{MARKS[name]}")
        if DATASET in folders:
            check_dataset(folders[DATASET])

    with contextlib.ExitStack() as stack:
        # The first folder entered is completed last: a complete dataset always has its tokenizer.
        folders = {
            name: stack.enter_context(
                new_folder(folder, "--dataset_url", _lacks_weights(folder), replaceable=(MARKS[name],))
            )
            for name, folder in missing.items()
        }
        digest = _Transfer(args, adopted, path, disable_tqdm=disable_tqdm).fetch(folders, check, is_head)
        for folder in folders.values():
            write_receipt(folder, digest, public_address(args.dataset_url))
    logger.info(f"The data is in {' and '.join(map(str, missing.values()))}")


def fetch_shard(args: DataOptions, adopted: Adopted, shard: Shard, manifest: Manifest) -> None:
    """Download a shard from beside the archive of the manifest, check it, and put its file into the dataset's folder.

    :raises UserError: if it is not available, or is not what the manifest says
    """
    target = Path(args.dataset_path, shard.file)
    transfer = _Transfer(args, adopted, target.with_name(f".{target.name}.download"), shard, disable_tqdm=True)
    with new_file(target) as temporary:
        file = temporary.parent / shard.file

        def check() -> None:
            if (size := file.stat().st_size) != shard.unpacked:
                raise ValueError(f"{size} bytes instead of {shard.unpacked}")
            table = open_samples([file], manifest.objective, shard.samples)
            check_samples(table, manifest.max_seq_length, manifest.vocab_size)

        transfer.fetch({DATASET: temporary.parent}, check)
        file.replace(temporary)


def _seconds_to_wait(response: requests.Response) -> float:
    """Return the seconds that a server asks to wait, at most MAX_RETRY_AFTER; 0 if it does not say."""
    try:
        seconds = Retry().parse_retry_after(response.headers.get("Retry-After", "0"))
    except (urllib3.exceptions.InvalidHeader, OverflowError):
        return 0.0
    return min(MAX_RETRY_AFTER, max(0.0, seconds))


class _Transfer:
    """Download of the archive at --dataset_url, or of a shard beside it, to a path.

    The messages of requests and urllib3 quote the whole address, so no error message contains them.
    """

    def __init__(
        self, args: ModelOptions, adopted: Adopted, path: Path, shard: Shard | None = None, disable_tqdm: bool = False
    ):
        is_adopted = "dataset_url" in adopted.names
        self.path, self.disable_tqdm = path, disable_tqdm
        self.url, self.expected, self.expected_head = args.dataset_url, args.dataset_sha256, args.dataset_head_sha256
        self.limit = MAX_DOWNLOAD_BYTES if is_adopted else math.inf
        if shard is not None:
            self.url, self.expected = urljoin(self.url, shard.name), shard.sha256
            self.limit = min(self.limit, shard.bytes)
        self.address = public_address(self.url)
        self.session = requests.Session()
        self.session.max_redirects = 10
        self.session.trust_env = not is_adopted  # a password in .netrc, or a proxy, which checks nothing
        # requests reads these variables only if it trusts the whole environment.
        self.session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, GuardedAdapter(adopted.near if is_adopted else None))

    def fetch(self, folders: dict[str, Path], check: Callable[[], None], is_head: bool = False) -> str:
        """Download the archive, or of a large one its head, verify, unpack and check it; return its SHA-256."""

        def look_for_head() -> None:
            with contextlib.suppress(ArchiveError):  # it ends too early, or an older version wrote it, without a head
                digest = unpack_head(self.path, folders)
                check()
                if digest != self.expected_head:
                    self.path.unlink()
                    what = f"the small files of {self.address} have SHA-256 {digest} instead of {self.expected_head}"
                    raise UserError(f"--dataset_head_sha256: {what}; ask the organiser which is right")
                raise HeadUnpacked

        self.look_for_head = look_for_head if is_head else None
        try:
            with self.session:
                digest = self._download()
        except HeadUnpacked:
            logger.info(f"The first {self.path.stat().st_size / 1e6:,.0f} MB have what is needed")
            self.path.unlink()
            return self.expected or ""
        if self.expected is None:
            remedy = f"compare its SHA-256 with the organiser's, and pass it as --dataset_sha256: {digest}"
            logger.warning(f"Could not verify the archive at {self.address}: {remedy}")
        logger.info("Unpacking")
        try:
            unpack_archive(self.path, folders)
            try:
                check()
            except ArchiveError:
                raise
            except Exception as error:  # of any kind, since a stranger has written all of it
                raise ArchiveError(f"its samples are damaged ({first_line(error)})") from None
        except ArchiveError as error:
            self.path.unlink()
            what = f"{self.address} is not an archive from tokenize_wikitext103.py --archive: {error}"
            raise UserError(f"--dataset_url: {what}; ask the organiser for the address of that archive") from None
        self.path.unlink()
        return digest

    def _download(self) -> str:
        """Download the archive, and resume a partial file if the SHA-256 is known; return the SHA-256.

        :raises TemporaryError: after too many attempts
        :raises UserError: if the SHA-256 is another one, or the server refuses the request
        """
        failures, most, mismatches, error = 0, 0, 0, None
        for _ in range(MAX_TRIES):
            start = self.path.stat().st_size if self.expected is not None and self.path.exists() else 0
            try:
                is_resumed = self._receive(start)
            except TransientError as transient:
                error, size = transient, self.path.stat().st_size if self.path.exists() else 0
                if size > most:  # no reset if each attempt fails at the same offset
                    failures, most = 0, size
                if failures == len(PAUSES):
                    break
                pause = max(PAUSES[failures], transient.seconds)
                logger.warning(f"{self.address}: {error}; trying again in {pause:.0f} s")
                time.sleep(pause)
                failures += 1
                continue
            if stand_in := find_stand_in(self.path):
                self.path.unlink()
                remedy = "open the address in a browser, or ask the organiser for that of the archive"
                raise UserError(f"--dataset_url: {self.address} answers with {stand_in[0]}; {remedy}")
            digest = file_sha256(self.path)
            if self.expected in (None, digest):
                return digest
            self.path.unlink()
            mismatches += 1
            if mismatches == 2 or not is_resumed:
                what = f"{self.address} has SHA-256 {digest} instead of {self.expected}"
                raise UserError(f"--dataset_url: {what}; ask the organiser which is right")
            logger.warning("The resumed download does not match the SHA-256; downloading it anew")
        remedy = "check the address, or try again later"
        raise TemporaryError(f"--dataset_url: {self.address} cannot be downloaded ({error}); {remedy}")

    def _receive(self, start: int) -> bool:
        """Try once to receive the archive from byte `start` on; return whether the rest of a file was requested.

        :raises TransientError: for network errors and temporary status codes
        :raises UserError: if the request is invalid, or for other status codes
        """
        # No content encoding: offsets and checksum refer to the bytes of the file on the server.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        timeouts = CONNECT_TIMEOUT, SILENCE_TIMEOUT
        try:
            with self.session.get(self.url, headers=headers, stream=True, timeout=timeouts) as response:
                status = response.status_code
                # An address that a server has signed in a redirect may have expired; the next redirect has a new one.
                if status in TEMPORARY_TROUBLE or (status == 403 and response.history):
                    raise TransientError(f"the server answers with status {status}", _seconds_to_wait(response))
                if status not in ({200, 206, 416} if start else {200}):
                    remedy = "check the address and that it is public"
                    raise UserError(f"--dataset_url: {self.address} answers with status {status}; {remedy}")
                if status != 416:  # nothing is missing, or it is another file: the SHA-256 shows which
                    # Some servers send the rest with status 200, and say only in this field where it begins.
                    is_rest = status == 206 or response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
                    self._write(response.raw, start if is_rest else 0)
                return start > 0
        except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
            cause = error
            while deeper := cause.__cause__ or cause.__context__:
                cause = deeper
            if isinstance(cause, ssl.SSLCertVerificationError):
                what = f"the certificate of {self.address} is not trusted ({cause.verify_message})"
                remedy = (
                    "if a proxy of this network checks connections, set REQUESTS_CA_BUNDLE to its certificate's file"
                )
                raise UserError(f"--dataset_url: {what}; {remedy}") from None
            place = "the proxy of http_proxy: " if isinstance(error, requests.exceptions.ProxyError) else ""
            raise TransientError(place + (getattr(cause, "strerror", None) or type(cause).__name__)) from None
        except requests.RequestException as error:
            what = f"{self.address} cannot be requested ({type(error).__name__}); check the address"
            if str(error).startswith("Missing dependencies for SOCKS"):
                what = "the proxy in ALL_PROXY is of SOCKS: run pip install PySocks 'httpx[socks]', or unset ALL_PROXY"
            raise UserError(f"--dataset_url: {what}") from None

    def _write(self, body: urllib3.BaseHTTPResponse, start: int) -> None:
        """Write the body of a response to the file, after its first `start` bytes."""
        missing = body.length_remaining
        size = None if missing is None else start + missing
        verb = f"Resuming at {format_size(start)}:" if start else "Downloading"
        logger.info(f"{verb} {self.address}{'' if size is None else f', {format_size(size)}'}")
        check_space(self.path.parent, (missing or 0) if self.look_for_head is None else 0)
        options = {"initial": start, "total": size, "unit": "B", "unit_scale": True, "disable": self.disable_tqdm}
        with (
            open(self.path, "ab" if start else "wb") as file,
            ProgressBar(desc="Downloading the data", **options) as progress,
        ):
            since, received, next_look = time.monotonic(), 0, FIRST_LOOK
            # Unlike `read`, `read1` does not wait for a full block: no received bytes are lost on an interruption.
            while block := body.read1(READ_BYTES, decode_content=False):
                if max(size or 0, file.tell() + len(block)) > self.limit:
                    self.path.unlink()
                    text = (
                        f"has more than {self.limit / 1e9:.3g} GB: refused; if you want it, pass the address yourself"
                    )
                    raise UserError(f"--dataset_url: {self.address} {text}")
                check_space(self.path.parent, len(block))
                file.write(block)
                progress.update(len(block))
                if self.look_for_head is not None and (size or 0) > LARGE and file.tell() >= next_look:
                    file.flush()
                    self.look_for_head()
                    next_look = 4 * file.tell()
                received += len(block)
                if (now := time.monotonic()) - since > SPEED_WINDOW:
                    if received < MIN_SPEED * SPEED_WINDOW:
                        raise TransientError(f"fewer than {MIN_SPEED:,} bytes a second")
                    if progress.disable:
                        logger.info(f"Downloaded {file.tell() / 1e6:,.0f} MB")
                    since, received = now, 0
