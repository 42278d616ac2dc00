"""Folders and files that are either complete or not there, whatever moment a process is killed at.

They are made under a hidden name beside the target, synced to disk, and renamed. While it is being made, such a folder
is locked by its maker: one that is not locked was left behind by a process that died, and is removed by the next.
"""

import contextlib
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import lock_descriptor

from lib.common.errors import UserError


def _sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's entries, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_target(target: Path, flag: str, overwrite: bool = False, replaceable: tuple[str, ...] = ()) -> None:
    """Check that a folder or file may be made at `target`.

    :param flag: the flag that names it, for the message
    :param overwrite: whether what is there may be replaced
    :param replaceable: a folder is only replaced if it has one of these files: --overwrite with a mistyped path must
        not cost anybody a home directory
    :raises UserError: if something is there that is not to be replaced
    """
    if target.is_dir() and replaceable:
        if not any(target.iterdir()):
            return
        if not any((target / name).is_file() for name in replaceable):
            raise UserError(f"{flag}: the folder '{target}' holds something else; choose another path")
    elif target.is_dir() or (target.exists() and replaceable):
        raise UserError(f"{flag}: '{target}' is a {'folder' if target.is_dir() else 'file'}; choose another path")
    if target.exists() and not overwrite:
        raise UserError(f"{flag}: '{target}' is there already; pass --overwrite to replace it, or another path")


def _hidden_name(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.{suffix}")


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what killed runs left in a folder; undo a replacement that was cut short.

    :param name: pattern of the names of the targets
    """
    for path in folder.glob(f".{name}.{'[0-9a-f]' * 12}.old"):
        target = path.with_name(path.name[1:-17])
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(target)
    for path in folder.glob(f".{name}.{'[0-9a-f]' * 12}.new"):
        with contextlib.suppress(OSError), _locked(path):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder while the process lives. Raises BlockingIOError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock_descriptor(descriptor, blocking=False):
            raise BlockingIOError(f"{folder} is locked by another process")
        yield
    finally:
        os.close(descriptor)


def make_parent(target: Path) -> None:
    """Make the folder that `target` is to be in."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"'{target.parent}' is not a folder; choose another path") from None


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """An empty hidden folder beside `target`, which is removed at the end unless it has been renamed."""
    make_parent(target)
    remove_leftovers(target.parent, glob.escape(target.name))
    folder = _hidden_name(target, "new")
    folder.mkdir()
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def new_folder(target: Path, flag: str, overwrite: bool = False, replaceable: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield a folder to fill; it appears at `target` when the block ends, and not at all if the block raises.

    A folder that is at `target` is there until then, see `check_target` for `flag`, `overwrite` and `replaceable`.
    """
    path = target.resolve()  # a link stays a link
    remove_leftovers(path.parent, glob.escape(path.name))  # or bring the target back
    check_target(target, flag, overwrite, replaceable)
    with temporary_folder(path) as folder:
        yield folder
        for entry in [*folder.rglob("*"), folder]:
            _sync(entry)
        check_target(target, flag, overwrite, replaceable)  # another run may have been faster
        old = _hidden_name(path, "old")
        try:
            if path.exists():
                path.rename(old)
            folder.rename(path)
        except BaseException:
            if old.exists() and not path.exists():
                old.rename(path)
            raise
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield the path of a file to write; it appears at `target`, in place of what is there, when the block ends."""
    target = target.resolve()
    with temporary_folder(target) as folder:
        path = folder / target.name
        yield path
        _sync(path)
        path.replace(target)
        _sync(target.parent)


@contextlib.contextmanager
def lock_folder(folder: Path, flag: str) -> Iterator[None]:
    """Keep a second process from writing to the same folder.

    :raises UserError: if another process has it
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        # Not a FileLock: forked children would give it up, but hivemind's processes use the folder's identity, too.
        if not lock_descriptor(file.fileno(), blocking=False):
            raise UserError(f"{flag}: '{folder}' is in use by another peer; pass another folder to this one")
        yield
