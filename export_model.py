#!/usr/bin/env python3
"""Make a folder of a checkpoint that other programs open: a model, with the adapters merged into their base.

./export_model.py monitor_outputs my-model --ollama
"""

from cotrain.common.errors import UserError, announce_imports, run_script  # isort: skip
import shlex
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

from cotrain.common.atomic_files import check_target, new_folder
from cotrain.common.flags import Flags, flag, format_size
from cotrain.common.run_folder import find_checkpoint

POSITIONAL = {
    "CHECKPOINT": "Checkpoint, or output folder, of which the newest complete checkpoint is taken",
    "OUT": "Folder to write",
}


# What such a folder has, and --overwrite replaces: no .git, and no files of other programs
EXPORTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*", "NOTICE*", "Modelfile")


@dataclass
class ExportArguments(Flags, group="Export"):
    """What is written."""

    ollama: bool = flag(False, "Also write a Modelfile, with which Ollama imports the folder")
    license: str | None = flag(None, "License for the card, such as apache-2.0. Default: what the base states")
    overwrite: bool = flag(False, "Replace OUT if it is a model")
    debug: bool = flag(False, "Show the traceback of a fatal error")


def main() -> None:
    from cotrain.common.argument_parser import ArgumentParser

    args, positional = ArgumentParser([ExportArguments], __doc__, POSITIONAL).parse().arguments
    checkpoint, out = find_checkpoint(Path(positional.CHECKPOINT)), Path(positional.OUT)
    check_target(out, "OUT", args.overwrite, ("config.json",), EXPORTED)  # before slow imports
    out.parent.mkdir(parents=True, exist_ok=True)
    announce_imports()
    from transformers.utils.logging import set_verbosity_error

    from cotrain.monitoring.export import export, export_size

    set_verbosity_error()
    warnings.simplefilter("ignore")
    size, free = export_size(checkpoint), shutil.disk_usage(out.parent).free
    print(f"Writing {checkpoint} to {out}: {format_size(size)}; {format_size(free)} are free on that disk")
    if size > 0.99 * free:
        raise UserError(f"OUT: {format_size(size)} are needed, {format_size(free)} are free; choose another disk")
    with new_folder(out, "OUT", args.overwrite, replaceable=("config.json",), own=EXPORTED) as folder:
        is_causal = export(checkpoint, folder, out.resolve().name, args.license, args.ollama)
    name = shlex.quote(str(out.resolve()))
    print(f"Done. ./generate.py {name} talks with it; other programs that read models of transformers open it, too")
    if args.ollama:
        print(f"For Ollama:\n  cd {name} && ollama create my-model -f Modelfile")
    if is_causal:
        print("For programs that read GGUF, with the two commands of llama.cpp, in its folder:")
        print(f"  python convert_hf_to_gguf.py {name} --outfile model.gguf")
        print("  build/bin/llama-quantize model.gguf model-q4.gguf Q4_K_M")


if __name__ == "__main__":
    run_script(main)
