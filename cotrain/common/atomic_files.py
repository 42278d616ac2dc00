"""Atomic creation of files and folders: a target is complete or absent, even if the process is killed.

A target is made in a hidden folder beside it, synced to disk, and renamed. The process that fills a hidden folder
holds a lock on it. A hidden folder without a lock was left by a killed process, and is removed by the next one.
"""

import contextlib
import errno
import fnmatch
import glob
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import lock_descriptor

from cotrain.common.errors import UserError, require_writable

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
IN_USE = "{}: '{}' is in use by another peer; pass a different folder for each peer"


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_target(
    target: Path, flag: str, overwrite: bool = False, replaceable: tuple[str, ...] = (), own: tuple[str, ...] = ("*",)
) -> None:
    """Raise UserError, naming the flag of `target`, if no folder or file may be created there.

    :param replaceable: file names; for a folder. An existing folder is replaced only if it contains one of them, so
        that --overwrite with a mistyped path cannot delete a home directory
    :param own: patterns of the names that such a folder has; one with another name, such as .git, is not replaced
    """
    require_writable(target.resolve().parent, flag)
    if target.is_mount() and replaceable:
        raise UserError(f"{flag}: '{target}' is a mount point, which cannot be replaced; pass a folder in it")
    if target.is_dir() and replaceable:
        if not any(target.iterdir()):
            return
        names = sorted(path.name for path in target.iterdir())
        others = [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in own)]
        if others or not any((target / name).is_file() for name in replaceable):
            what = f"other files ({', '.join(others or names):.80})"
            raise UserError(f"{flag}: the folder '{target}' contains {what}; choose another path")
    elif target.is_dir() or (target.exists() and replaceable):
        raise UserError(f"{flag}: '{target}' is a {'folder' if target.is_dir() else 'file'}; choose another path")
    if target.exists() and not overwrite:
        raise UserError(f"{flag}: '{target}' already exists; pass --overwrite to replace it, or another path")


def _hidden_name(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.{suffix}")


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left beside targets (a glob pattern), and undo their unfinished replacements."""
    for path in folder.glob(f".{name}.{'[0-9a-f]' * 12}.old"):
        target = path.with_name(path.name[1:-17])
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(target)
    for path in folder.glob(f".{name}.{'[0-9a-f]' * 12}.new"):
        with contextlib.suppress(OSError), _locked(path) as is_locked:
            if is_locked:
                shutil.rmtree(path, ignore_errors=True)


def _try_lock(descriptor: int) -> bool | None:
    """Lock a file or a folder. False: another process has locked it; None: the file system has no locks (`flock`)."""
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder while the block runs, and yield whether it is locked. The lock ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield bool(_try_lock(descriptor))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield an empty hidden folder beside `target`; remove it at the end unless it has been renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent, glob.escape(target.name))
    folder = _hidden_name(target, "new")
    folder.mkdir()
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def new_folder(
    target: Path, flag: str, overwrite: bool = False, replaceable: tuple[str, ...] = (), own: tuple[str, ...] = ("*",)
) -> Iterator[Path]:
    """Yield a folder to fill; it appears at `target` when the block ends, and not at all if the block raises.

    An existing folder at `target` stays until then. The arguments and UserError are those of `check_target`.
    """
    path = target.resolve()  # a symbolic link is kept; the folder that it points to is replaced
    remove_leftovers(path.parent, glob.escape(path.name))  # may restore the target
    check_target(target, flag, overwrite, replaceable, own)
    with temporary_folder(path) as folder:
        yield folder
        for entry in [*folder.rglob("*"), folder]:
            sync(entry)
        check_target(target, flag, overwrite, replaceable, own)  # another process may have created the target
        old = _hidden_name(path, "old")
        try:
            if path.exists():
                path.rename(old)
            folder.rename(path)
        except BaseException:
            if old.exists() and not path.exists():
                old.rename(path)
            raise
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield the path of a file to write; it replaces `target` when the block ends, and not if the block raises."""
    target = target.resolve()
    with temporary_folder(target) as folder:
        path = folder / target.name
        yield path
        sync(path)
        path.replace(target)
        sync(target.parent)


def require_free(folder: Path, flag: str) -> None:
    """Raise UserError, naming the flag, if no file can be made in a folder, or another process has locked it."""
    require_writable(folder, flag)
    with contextlib.suppress(OSError), open(folder / LOCK_NAME, "rb") as file:
        if _try_lock(file.fileno()) is False:
            raise UserError(IN_USE.format(flag, folder))


@contextlib.contextmanager
def lock_folder(folder: Path, flag: str, name: str = LOCK_NAME) -> Iterator[str]:
    """Create and lock a folder while the block runs: other processes raise UserError. Yield a logged fault, or ""."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "w", encoding="utf-8") as file:
        # Not filelock's FileLock: a forked child would release it, but hivemind's child processes must keep it, since
        # they use the folder's identity.
        is_free, fault = _try_lock(file.fileno()), ""
        if is_free is False:
            raise UserError(IN_USE.format(flag, folder))
        if is_free is None:
            fault = f"{flag}: the file system of '{folder}' has no locks: use a local disk, or only one peer there"
            logger.warning(fault)
        yield fault
