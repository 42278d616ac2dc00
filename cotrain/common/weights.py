"""Names of the files with a model's weights."""

import json
from pathlib import Path

from cotrain.common.flags import ArgumentsError, require
from cotrain.common.run_folder import ADAPTERS
from cotrain.common.stand_ins import find_damage


def weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files of the model in a folder; ArgumentsError if its index is damaged."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return ["model.safetensors"]
    try:
        names = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        return [index.with_name(name).name for name in names]  # raises ValueError for what is in another folder
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ArgumentsError(f"'{index}' is damaged, or no index of files beside it; copy the model again") from None


def check_model(flag: str, folder: Path) -> None:
    """Raise ArgumentsError if a folder has adapters instead of a model, or its files are damaged. It may lack some."""
    remedy = "merge them with ./export_model.py, or remove them"
    require(not (folder / ADAPTERS).is_file(), f"{flag}: '{folder}' has adapters: {remedy}")
    for file in filter(Path.is_file, (folder / name for name in ("config.json", *weight_files(folder)))):
        damage = find_damage(file)
        remedy = "; copy the model again" if "incomplete" in str(damage) else ""  # that for a pointer is in its words
        require(damage is None, f"{flag}: {damage}{remedy}")
