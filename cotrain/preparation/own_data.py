"""A trainer's own text: prepared on its machine as the run's is, and kept there."""

import glob
import hashlib
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path

import datasets

from cotrain.common.atomic_files import new_folder, temporary_folder
from cotrain.common.errors import UserError
from cotrain.data.manifest import MANIFEST_NAME, Manifest
from cotrain.preparation.chat_shapes import ChatReader
from cotrain.preparation.corpus import Source, open_corpus, read_corpus
from cotrain.preparation.lost_text import check_losses
from cotrain.preparation.packing import PackingConfig
from cotrain.preparation.saving import open_encoder, save_dataset
from cotrain.preparation.sources import describe_files, open_dataset, open_files

logger = logging.getLogger(__name__)

VALIDATION_FRACTION = 0.05  # of the documents, at least one, is held out for the trainer's own loss


def prepare_own_data(path: str, run: Manifest, tokenizer: Path, folder: Path) -> None:
    """Prepare the text at `path` like the run's data, unless `folder` has it from the same files and settings.

    :param run: description of the run's data, which may have no samples
    :raises UserError: if it cannot be read
    """
    config = PackingConfig(run.objective, run.max_seq_length, run.seed, run.language)
    files = describe_files(glob.escape(path) if Path(path).exists() else path)
    digest = hashlib.sha256(repr((files, asdict(config), run.tokenizer_sha256)).encode()).hexdigest()
    if (folder / MANIFEST_NAME).is_file():
        if files and Manifest.load(folder).source == digest:  # a pipe may bring another text
            return
        logger.info(f"--own_data: '{path}', or what the run makes of it, has changed: preparing it again")
    datasets.disable_progress_bars()
    target = new_folder(folder, "--own_data", True, (MANIFEST_NAME,))
    try:
        with target as new, temporary_folder(folder.with_name("own_data-work")) as work:
            source = _open(path, work, ChatReader("all") if run.objective == "chat" else "text")
            (text := work / "text").mkdir()
            read_corpus(replace(source, seen=set()), text)  # nothing is refused: a line says how much is left out
            corpus = open_corpus(source, text, VALIDATION_FRACTION, run.seed)
            check_losses(open_encoder(str(tokenizer)), corpus, run.seed, "the tokenizer of the run", False)
            splits, _ = save_dataset(corpus, tokenizer, config, 1, work, new)
            if not splits["train"]["instances"]:
                raise UserError(f"{source.name}: no conversation fits into the run's {config.max_seq_length} tokens")
            replace(run, source=digest, splits=splits, shards=[]).save(new)
    except UserError as error:
        what = re.sub(r"^--\w+: ", "", str(error).partition(";")[0])  # a flag of the organiser's
        section = "conversations" if run.objective == "chat" else "how-text-is-read"
        raise UserError(f"--own_data: {what}; see docs/data.md#{section}") from None


def _open(path: str, work: Path, column: str | ChatReader) -> Source:
    if Path(path).is_dir():
        return open_dataset(path, None, column, None, cache_dir=str(work))
    return open_files(path, work, column, None)
