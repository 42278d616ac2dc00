"""The archive that the folders of the data are from.

A folder that was unpacked or packed has a receipt: the SHA-256 of its archive and, if it was downloaded, the address.
A folder of another archive than that of the run is moved to `other-archives/SHA256` beside it, and back once a peer of
its run starts again.
"""

import fcntl
import logging
from pathlib import Path
from typing import BinaryIO

from urllib3.util import parse_url

from cotrain.common.errors import UserError
from cotrain.data.archive import DATASET, TOKENIZER
from cotrain.options import ModelOptions
from cotrain.settings import BASE_FOLDER

logger = logging.getLogger(__name__)

# The file that marks a folder as complete
MARKS = {DATASET: "manifest.json", TOKENIZER: "tokenizer_config.json", BASE_FOLDER: "config.json"}
RECEIPT = "archive.sha256"
OTHERS = "other-archives"
in_use: dict[Path, BinaryIO] = {}  # marks of the datasets that this process reads, with a shared lock until it ends


def find_folders(args: ModelOptions) -> dict[str, tuple[str, Path]]:
    """Return the flag and the folder of each part of the archive that a peer needs, the dataset first."""
    paths = {
        DATASET: ("dataset_path", args.dataset_path),  # a monitor has none
        TOKENIZER: ("tokenizer_path", args.tokenizer_path),
        BASE_FOLDER: ("model_name_or_path", BASE_FOLDER if args.model_name_or_path == BASE_FOLDER else None),
    }
    return {name: (flag, Path(path)) for name, (flag, path) in paths.items() if path is not None}


def public_address(url: str) -> str:
    """Return an address without query, user name and password, which may be credentials."""
    return parse_url(url)._replace(auth=None, query=None, fragment=None).url


def write_receipt(folder: Path, digest: str, address: str = "") -> None:
    """Write into a folder which archive it is from."""
    (folder / RECEIPT).write_text(f"{digest}\n{address}\n", encoding="utf-8")


def claim_folders(args: ModelOptions) -> None:
    """Move the folders of other archives aside, and those of this archive to their place. The caller holds the lock.

    :raises UserError: if another process reads the data that is in the way
    """
    for name, (flag, folder) in find_folders(args).items():
        digest = find_foreign_archive(folder, args)
        if digest is not None:
            if name == DATASET and not _is_free(folder / MARKS[name]):
                raise UserError(
                    f"--{flag}: '{folder}' has the data of another archive, which a trainer reads; stop it, or pass "
                    "--dataset_path and --tokenizer_path with folders of this run"
                )
            aside = folder.parent / OTHERS / digest[:16] / folder.name
            aside.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(aside)
            logger.warning(f"'{folder}' was from another archive than this run's: it is in '{aside}' now")
        if not (folder / MARKS[name]).is_file():
            for kept in folder.parent.glob(f"{OTHERS}/*/{folder.name}"):
                if (kept / RECEIPT).is_file() and find_foreign_archive(kept, args) is None and not folder.exists():
                    kept.rename(folder)
                    logger.info(f"'{folder}' is that of '{kept.parent}' again")


def find_foreign_archive(folder: Path, args: ModelOptions) -> str | None:
    """Return the SHA-256 of the archive that a folder is from, if that is another one than --dataset_url."""
    try:
        digest, address = [*(folder / RECEIPT).read_text(encoding="utf-8").splitlines(), ""][:2]
    except (OSError, ValueError):
        return None
    if args.dataset_sha256 is None:
        is_foreign = bool(address) and address != public_address(args.dataset_url or "")
    else:
        is_foreign = digest != args.dataset_sha256
    return digest if is_foreign else None


def _is_free(mark: Path) -> bool:
    """Whether no process reads the dataset with a mark, as far as its lock tells."""
    with open(mark, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def keep_in_use(dataset: Path) -> None:
    """Keep other processes from moving a dataset aside until this one has ended."""
    mark = dataset / MARKS[DATASET]
    if mark not in in_use and mark.is_file():
        in_use[mark] = open(mark, "rb")  # noqa: SIM115  it is closed when the process ends
        fcntl.flock(in_use[mark], fcntl.LOCK_SH)
