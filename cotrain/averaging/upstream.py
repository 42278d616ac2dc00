"""Digests of the modules of hivemind that this project replaces, overrides or relies on, in the tested version.

docs/upgrading-hivemind.md has the catalogue of the workarounds and the steps to take when hivemind changes.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path

import hivemind
from hivemind.utils import get_logger

logger = get_logger(__name__)

TESTED_VERSION = "1.1.12"

# Module of hivemind -> first 16 hexadecimal digits of the SHA-256 of its source
TESTED = {
    "averaging.allreduce": "2a67006fc98b9683",
    "averaging.averager": "932a59ddb7e0933d",
    "averaging.control": "894d5d5cb517485c",
    "averaging.matchmaking": "6a775570b7183d7e",
    "averaging.partition": "8905c51826c26d18",
    "compression.base": "9ebe625a254144f7",
    "compression.quantization": "02c8dda6e476e735",
    "compression.serialization": "0c94266be46552b3",
    "dht.crypto": "3b836042a52099ed",
    "dht.dht": "b41230a61e3d04e4",
    "dht.node": "0957c32e123e13b0",
    "dht.protocol": "2fc86983799b090a",
    "dht.schema": "001a6b84fc4161e9",
    "dht.storage": "716d2792852c15de",
    "dht.validation": "cb90f1cb7303af43",
    "optim.optimizer": "e991b49f4868358c",
    "optim.progress_tracker": "adfcd7467c78d666",
    "optim.state_averager": "55c2b6ad4d40a402",
    "p2p.p2p_daemon": "1eda97687e0a6c5a",
    "p2p.p2p_daemon_bindings.control": "526366fef4a6a2c0",
    "p2p.servicer": "c03aec53776ff134",
    "utils.asyncio": "cc391248ba0736d5",
    "utils.crypto": "e84b422d692c0747",
    "utils.mpfuture": "d3bb82f0ff3070e6",
    "utils.serializer": "7b22cfb275a5a9f2",
}


def digest(module: str) -> str:
    """Return the digest of a module of hivemind, named as in TESTED; "missing" if it does not exist."""
    try:
        return hashlib.sha256(Path(find_spec(f"hivemind.{module}").origin).read_bytes()).hexdigest()[:16]
    except (ImportError, AttributeError, OSError):
        return "missing"


def warn_of_changes() -> None:
    """Log one warning if the installed hivemind is not the tested version."""
    changed = [f"{module.replace('.', '/')}.py" for module, tested in TESTED.items() if digest(module) != tested]
    if changed or hivemind.__version__ != TESTED_VERSION:
        logger.warning(
            f"hivemind {hivemind.__version__} is installed, {TESTED_VERSION} was tested. Check the rows of "
            f"docs/upgrading-hivemind.md that name one of these files: {', '.join(changed) or 'none has changed'}"
        )
