"""The prepared data as one file to host. The same data gives the same archive, byte for byte."""

import gzip
import hashlib
import tarfile
from pathlib import Path

from tqdm.auto import tqdm
from tqdm.utils import CallbackIOWrapper

from atomic import new_file


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
    with open(path, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    with new_file(path.with_name(f"{path.name}.sha256")) as temporary:
        temporary.write_text(f"{digest}  {path.name}\n")
    return digest
