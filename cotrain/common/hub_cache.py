"""Downloads of the Hugging Face Hub on this machine: where a repository is, and whether the Hub answers."""

import logging
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, is_offline_mode

from cotrain.common.errors import UserError, first_line

logger = logging.getLogger(__name__)

DOWNLOADS = "data/cache"  # of the scripts
PROBE_SECONDS = 5.0
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # variables that name those to be trusted


def find_downloads(name: str, cache_dir: str | None) -> dict[str, Any]:
    """Return options of transformers and of the Hub's library for a model's repository.

    A model may have been downloaded by another program, or by a script with another --cache_dir: the folder that has
    most of its files is used. Without the Hub only they are: the library would retry for 28 s for each file.
    """
    repository = "models--" + name.replace("/", "--")  # as the library names it
    folders = [cache_dir or constants.HF_HUB_CACHE, constants.HF_HUB_CACHE, DOWNLOADS]
    found = max(folders, key=lambda folder: len([*Path(folder, repository).glob("snapshots/*/*")]))
    return {"cache_dir": str(found), "local_files_only": is_silent()}


def is_silent() -> bool:
    """Whether the Hub does not answer, and is tried in vain. False with HF_HUB_OFFLINE, which the libraries obey."""
    return not is_offline_mode() and not probe(constants.ENDPOINT, int(time.monotonic()) // 60)


@cache
def probe(address: str, _minute: int) -> bool:
    try:
        get_session().head(address, timeout=PROBE_SECONDS)
    except FileNotFoundError:  # httpx reads them before it asks
        name = next((name for name in CERTIFICATES if not Path(os.environ.get(name, ".")).exists()), CERTIFICATES[0])
        raise UserError(f"{name}: there is no '{os.environ.get(name)}'; correct it, or unset {name}") from None
    except Exception as error:  # of httpx, proxies, certificates
        logger.warning(f"{address} does not answer ({first_line(error)}): using what was downloaded before")
        return False
    return True
