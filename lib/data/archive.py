"""The prepared data as one file to host: packed by the organiser, unpacked by each volunteer.

The same data gives the same archive, byte for byte. What an archive from elsewhere may hold is narrow.
"""

import gzip
import hashlib
import re
import shutil
import tarfile
import zlib
from pathlib import Path

from tqdm.auto import tqdm
from tqdm.utils import CallbackIOWrapper

from lib.common.atomic_files import new_file
from lib.common.errors import UserError

DATASET, TOKENIZER = "data/albert_tokenized_wikitext", "data/tokenizer"  # as the folders are named in an archive
_LAYOUT = {
    DATASET: re.compile(r"(manifest|dataset_dict)\.json|(train|validation)/\w[\w.-]*\.(arrow|json)", re.ASCII),
    TOKENIZER: re.compile(r"\w[\w.-]*\.(json|model|txt|jinja)", re.ASCII),  # no code
}

# Against archives that are small and unpack to terabytes: WikiText-103 shrinks to a quarter, repetitive text to less.
MAX_RATIO = 20
MIN_LIMIT = 64 * 2**20
MAX_MEMBERS = 10_000
MAX_HEADER = 2**16  # bytes of a long name, which is read into memory
SPARE_BYTES = 100 * 2**20  # of the disk, left free


class ArchiveError(UserError):
    """An archive that is not one of ours, or damaged."""


def write_archive(path: Path, folders: dict[str, Path]) -> str:
    """Pack folders into a .tar.gz, and write its checksum beside it for `sha256sum -c`.

    :param folders: name in the archive -> folder on disk
    :returns: SHA-256 of the archive
    """
    files = sorted(
        (f"{name}/{file.relative_to(folder).as_posix()}", file)
        for name, folder in folders.items()
        for file in folder.rglob("*")
        if file.is_file()
    )
    num_bytes = sum(file.stat().st_size for _, file in files)
    with (
        new_file(path) as temporary,
        # Neither times, owners nor names of this machine are kept, in the tar or in gzip's header.
        open(temporary, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0) as compressed,
        tarfile.open(mode="w", fileobj=compressed, format=tarfile.PAX_FORMAT) as archive,
        tqdm(total=num_bytes, desc=f"Packing {path.name}", unit="B", unit_scale=True) as progress,
    ):
        for name, file in files:
            entry = tarfile.TarInfo(name)  # mtime, uid and gid are 0, uname and gname empty, the mode is 0644
            entry.size = file.stat().st_size
            with open(file, "rb") as content:
                archive.addfile(entry, CallbackIOWrapper(progress.update, content))
    digest = file_sha256(path)
    with new_file(path.with_name(f"{path.name}.sha256")) as temporary:
        temporary.write_text(f"{digest}  {path.name}\n")
    return digest


def file_sha256(path: Path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise UserError if a disk has no room for so many bytes more."""
    free = shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free:
        raise UserError(
            f"'{folder}': {(num_bytes + SPARE_BYTES) / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free; free "
            f"some space or choose another folder"
        )


class _Entry(tarfile.TarInfo):
    """A header that is refused as soon as it is read, before tarfile acts on it."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "_Entry":
        entry = super().frombuf(buf, encoding, errors)
        if entry.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):  # says more about the next one
            if not 0 <= entry.size <= MAX_HEADER:
                raise ArchiveError("it has a header of a size that none of ours has")
        elif entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            raise ArchiveError(f"{entry.name[:100]!a} in it is neither a file nor a folder")
        return entry


def unpack_archive(path: Path, folders: dict[str, Path]) -> None:
    """Unpack what `write_archive` has packed, maybe on the machine of somebody who means harm.

    :param folders: name in the archive -> folder on disk; what belongs to none of them is not unpacked
    :raises ArchiveError: if it holds anything that ours do not: other names, links, devices, far more than its size
        lets expect; or if it is damaged
    :raises UserError: if the disk has no room for it
    """
    limit = max(MIN_LIMIT, MAX_RATIO * path.stat().st_size)
    num_bytes = 0
    try:
        with (
            gzip.open(path) as compressed,
            tarfile.open(mode="r|", fileobj=compressed, tarinfo=_Entry, errorlevel=1) as archive,
        ):
            for number, entry in enumerate(archive):
                # The size comes first: to go on to the next entry, tarfile reads over the content of this one.
                num_bytes += entry.size
                if entry.size < 0 or entry.sparse is not None:
                    raise ArchiveError("it has an entry of an impossible size")
                if num_bytes > limit or number >= MAX_MEMBERS:
                    raise ArchiveError(f"it unpacks to more than {limit / 1e6:,.0f} MB or {MAX_MEMBERS:,} files")
                if entry.isdir():
                    continue  # folders are made as files need them
                part, name = _locate(entry.name)
                if part in folders:
                    check_space(folders[part], entry.size)
                    archive.extract(entry.replace(name=name, mode=0o644, deep=False), folders[part], filter="data")
            compressed.read(MIN_LIMIT)  # of the padding; at its end is gzip's checksum
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, RecursionError, ValueError) as error:
        raise ArchiveError(f"it is damaged, or no .tar.gz ({type(error).__name__})") from None


def _locate(name: str) -> tuple[str, str]:
    """Folder and name of a file in the archive. Only names that ours have come through: no '..', no root."""
    name = name.removeprefix("./")
    for part, names in _LAYOUT.items():
        if name.startswith(f"{part}/") and names.fullmatch(name[len(part) + 1 :]):
            return part, name[len(part) + 1 :]
    raise ArchiveError(f"{name[:100]!a} is in it, which is no part of the prepared data")
