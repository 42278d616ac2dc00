"""Archive of the prepared data: one file that the organiser packs and hosts, and each volunteer unpacks.

The same data gives the same archive, byte for byte. `unpack_archive` treats an archive as untrusted. A large one has a
head: the small files, with tokenizer and configurations, are first, and may be read alone.
"""

import gzip
import hashlib
import re
import shutil
import tarfile
import zlib
from pathlib import Path

from tqdm.utils import CallbackIOWrapper

from cotrain.common.atomic_files import new_file
from cotrain.common.errors import UserError
from cotrain.common.progress_bar import ProgressBar
from cotrain.options import DATASET_FOLDERS
from cotrain.settings import BASE_FOLDER

# Names of the folders in an archive. OLD_DATASET is accepted.
(DATASET, OLD_DATASET), TOKENIZER = DATASET_FOLDERS, "data/tokenizer"
_LAYOUT = {
    DATASET: re.compile(r"(manifest|dataset_dict)\.json|(train|validation)/\w[\w.-]{0,99}\.(arrow|json)", re.ASCII),
    TOKENIZER: re.compile(r"\w[\w.-]{0,99}\.(json|model|txt|jinja)", re.ASCII),  # no code
    BASE_FOLDER: re.compile(r"(generation_)?config\.json|model[\w.-]{0,99}\.(safetensors|json)", re.ASCII),
}

# Bounds against decompression bombs. WikiText-103 compresses to a quarter, repetitive text to less.
MAX_EXPANSION, MAX_UNPACKED = 20, 100e9  # of bytes; an archive of more than 20 GB may unpack to five times its size
MIN_LIMIT = 64 * 2**20
MAX_MEMBERS, MAX_TOKENIZER_FILE = 10_000, 100e6  # the second in bytes: it is read into memory
MAX_HEADER = 2**16  # bytes of a long name, which tarfile reads into memory
LARGE = 1e9  # bytes of an archive, from which on its head may be read alone
_LARGE_FILES = (".arrow", ".safetensors")
SPARE_BYTES = 100 * 2**20  # left free on the disk

# What gzip and tarfile raise for a damaged file
DAMAGE = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, RecursionError, ValueError, OverflowError)


class ArchiveError(UserError):
    """An archive that `write_archive` did not write, or a damaged one."""


def write_archive(path: Path, folders: dict[str, Path]) -> str:
    """Pack the data in folders (name in the archive -> folder on disk) into a .tar.gz, and return its SHA-256."""
    paths = ((name, folder, path) for name, folder in folders.items() for path in folder.rglob("*") if path.is_file())
    named = ((f"{name}/{path.relative_to(folder).as_posix()}", path) for name, folder, path in paths)
    files = sorted(item for item in named if _locate(item[0]))
    num_bytes = sum(file.stat().st_size for _, file in files)
    if num_bytes > LARGE:
        files.sort(key=lambda item: (item[0].endswith(_LARGE_FILES), item))
    with (
        new_file(path) as temporary,
        # Neither the tar nor gzip's header contains times, owners or names of this machine.
        open(temporary, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0) as compressed,
        tarfile.open(mode="w", fileobj=compressed, format=tarfile.PAX_FORMAT) as archive,
        ProgressBar(total=num_bytes, desc=f"Packing {path.name}", unit="B", unit_scale=True) as progress,
    ):
        for name, file in files:
            entry = tarfile.TarInfo(name)  # mtime, uid and gid are 0, uname and gname empty, the mode is 0644
            entry.size = file.stat().st_size
            with open(file, "rb") as content:
                archive.addfile(entry, CallbackIOWrapper(progress.update, content))
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise UserError if the disk of `folder` has less than `num_bytes` + SPARE_BYTES bytes free."""
    free = shutil.disk_usage(folder).free
    if (needed := num_bytes + SPARE_BYTES) > free:
        what = f"{needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free"
        raise UserError(f"'{folder}': {what}; free some space or choose another folder")


class _Entry(tarfile.TarInfo):
    """A tar header that is checked as soon as it is read, before tarfile acts on it."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "_Entry":
        entry = super().frombuf(buf, encoding, errors)
        if entry.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):  # metadata of the next entry
            if not 0 <= entry.size <= MAX_HEADER:
                raise ArchiveError("a header in it has an invalid size")
        elif entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            raise ArchiveError(f"{entry.name[:100]!a} in it is neither a file nor a folder")
        return entry


def unpack_head(path: Path, folders: dict[str, Path]) -> str:
    """Unpack the small files of a large archive; return the SHA-256 of all bytes before the others, uncompressed."""
    missing, digest = unpack_archive(path, folders, is_head=True), hashlib.sha256()
    with gzip.open(path) as content:
        while block := content.read(min(missing, 2**20)):
            digest.update(block)
            missing -= len(block)
    return digest.hexdigest()


def unpack_archive(path: Path, folders: dict[str, Path], is_head: bool = False) -> int:
    """Unpack an archive made by `write_archive`; treat it as untrusted.

    :param folders: as for `write_archive`; entries that belong to none of them are not unpacked
    :param is_head: stop before the first large file, and return where it begins
    :raises ArchiveError: if the archive is damaged, has other names, links or devices, or unpacks to too much
    :raises UserError: if the disk has not enough free space
    """
    num_bytes, size = 0, path.stat().st_size
    limit = max(MIN_LIMIT, min(MAX_EXPANSION * size, MAX_UNPACKED), 5 * size)
    try:
        with (
            gzip.open(path) as compressed,
            tarfile.open(mode="r|", fileobj=compressed, tarinfo=_Entry, errorlevel=1) as archive,
        ):
            for number, entry in enumerate(archive):
                if is_head and entry.name.endswith(_LARGE_FILES):
                    return entry.offset
                # Check the size first: to reach the next entry, tarfile reads through the content of this one.
                num_bytes += entry.size
                if entry.size < 0 or entry.sparse is not None:
                    raise ArchiveError("an entry in it has an invalid size")
                if num_bytes > limit or number >= MAX_MEMBERS:
                    raise ArchiveError(f"it unpacks to more than {limit / 1e6:,.0f} MB or {MAX_MEMBERS:,} files")
                if entry.isdir():
                    continue  # folders are created with their first file
                if (located := _locate(entry.name)) is None:
                    raise ArchiveError(f"{entry.name[:100]!a} in it is not part of the prepared data")
                part, name = located
                if part == TOKENIZER and entry.size > MAX_TOKENIZER_FILE:
                    raise ArchiveError(f"{entry.name!a} in it has more than {MAX_TOKENIZER_FILE / 1e6:.0f} MB")
                if part in folders:
                    check_space(folders[part], entry.size)
                    archive.extract(entry.replace(name=name, mode=0o644, deep=False), folders[part], filter="data")
            compressed.read(MIN_LIMIT)  # the padding; gzip's checksum follows it
            return archive.offset
    except DAMAGE as error:
        raise ArchiveError(f"it is damaged or not a .tar.gz file ({type(error).__name__})") from None


def _locate(name: str) -> tuple[str, str] | None:
    """Split the name of an archive entry into folder and file name; None if it is not in _LAYOUT: no '..', no root."""
    name = name.removeprefix("./").replace(f"{OLD_DATASET}/", f"{DATASET}/", 1)
    for part, names in _LAYOUT.items():
        if name.startswith(f"{part}/") and names.fullmatch(name[len(part) + 1 :]):
            return part, name[len(part) + 1 :]
    return None
