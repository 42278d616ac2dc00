"""Loading of the prepared data in trainers and evaluators."""

import struct
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from datasets.table import InMemoryTable, MemoryMappedTable, Table, concat_tables
from transformers import PreTrainedTokenizerBase

from cotrain.common.errors import UserError, first_line
from cotrain.data.manifest import REMEDY, Manifest
from cotrain.data.schemas import SCHEMAS
from cotrain.models.objectives import SPLITS
from cotrain.models.vocabulary import tokenizer_sha256, vocabulary_size

# Of an Arrow file. A batch takes up to 5 KB of memory, an empty one 0.3 KB of the file.
MAX_ARROW_HEADER, FREE_BATCHES, BYTES_PER_BATCH = 2**20, 1000, 4096


def load_split(dataset_path: str | Path, split: str) -> Dataset:
    """Load a split; UserError if it is missing, damaged, or not as in the manifest."""
    manifest = Manifest.load(dataset_path)
    try:
        return Dataset(_open_split(dataset_path, split, manifest), fingerprint=split)
    except Exception as error:  # an interrupted copy raises anything from OSError to ArrowInvalid
        raise UserError(f"--dataset_path: '{dataset_path}' is damaged ({first_line(error)}); {REMEDY}") from error


def _open_split(dataset_path: str | Path, split: str, manifest: Manifest) -> Table:
    # Not all .arrow: whoever shuffles a split with `datasets` leaves cache-….arrow beside its files.
    files = sorted(Path(dataset_path, split).glob("data*.arrow"))
    return open_samples(files, manifest.objective, manifest.splits[split]["instances"])


def open_samples(files: Iterable[Path], objective: str, num_samples: int) -> Table:
    """Map Arrow files into memory; ValueError if they have other columns or another number of samples.

    The columns have the types of the objective. The files' metadata and the JSON files beside them, which could name
    other types and files, are not read: `datasets` opens the paths and URLs in a column of images.
    """
    files = list(files)
    if not files and not num_samples:  # of a trainer whose held-out conversations are all too long
        return InMemoryTable(SCHEMAS[objective].empty_table())
    for file in files:
        _check_messages(file, len(SCHEMAS[objective]))
    table = concat_tables([MemoryMappedTable.from_file(str(file)).replace_schema_metadata(None) for file in files])
    table = table.select(SCHEMAS[objective].names)
    if table.schema != SCHEMAS[objective]:
        raise ValueError("the columns have other types")
    if len(table) != num_samples:
        raise ValueError(f"{len(table)} samples instead of {num_samples}")
    return table


def _check_messages(file: Path, num_columns: int) -> None:
    """Raise ValueError unless what an Arrow file takes in memory is bounded by its size, which it is if mapped.

    Refused are compressed buffers, dictionaries, other numbers of columns, and more batches than such a file has.
    """
    with pa.memory_map(str(file)) as source:
        most = FREE_BATCHES + source.size() // BYTES_PER_BATCH
        for number, message in enumerate(pa.ipc.MessageReader.open_stream(source)):
            if message.type != ("record batch" if number else "schema") or len(message.metadata) > MAX_ARROW_HEADER:
                raise ValueError("it has parts that tokenize_wikitext103.py does not write")
            if number > most:
                raise ValueError(f"it has more than {most:,} batches")
            if number == 0 and len(pa.ipc.read_schema(message)) != num_columns:
                raise ValueError("it has other columns")
            if number and _is_compressed(message.metadata):
                raise ValueError("it is compressed in itself")


def _is_compressed(metadata: bytes) -> bool:
    """Whether the header of a record batch, a flatbuffer of Arrow's Message.fbs, states a compression.

    Arrow 0.17 stated it in the metadata of the message, which are refused.
    """

    def find(table: int, field: int) -> int:
        """Return the position of a field, 0 if the table lacks it."""
        offsets = table - struct.unpack_from("<i", metadata, table)[0]
        is_known = 4 + 2 * field < struct.unpack_from("<H", metadata, offsets)[0]
        offset = struct.unpack_from("<H", metadata, offsets + 4 + 2 * field)[0] if is_known else 0
        return offset and table + offset

    message = struct.unpack_from("<I", metadata)[0]
    header = find(message, 2)
    return find(header + struct.unpack_from("<I", metadata, header)[0], 3) > 0 or find(message, 4) > 0


def check_dataset(dataset_path: str | Path) -> None:
    """Check all samples beside the manifest; ValueError or UserError if a model could not train on one."""
    manifest = Manifest.load(dataset_path)
    for split in () if manifest.splits == {} else SPLITS[bool(manifest.shards) :]:  # of a run of --own_data none
        check_samples(_open_split(dataset_path, split, manifest), manifest.max_seq_length, manifest.vocab_size)


def check_samples(table: Table, max_seq_length: int, vocab_size: int) -> None:
    """Raise ValueError if a model could not train on one of the samples.

    WikiText-103, 118 million tokens, takes 0.1 s if it is in the page cache.
    """
    table.table.validate(full=True)
    for batch in filter(len, table.table.to_batches()):
        lengths = batch["input_ids"].value_lengths()
        _check_bounds("lengths", lengths, 1, max_seq_length)
        for name in batch.schema.names:
            values = batch[name]
            if pa.types.is_list(values.type):
                if values.value_lengths() != lengths:
                    raise ValueError(f"the sequences of {name} have other lengths than input_ids")
                values = values.flatten()
            _check_bounds(name, values, 0, vocab_size - 1 if name == "input_ids" else 1)


def _check_bounds(name: str, values: pa.Array, low: int, high: int) -> None:
    bounds = pc.min_max(values).as_py()
    if values.null_count or not low <= bounds["min"] <= bounds["max"] <= high:
        raise ValueError(f"{name} must be from {low} to {high}")


def load_manifest(
    dataset_path: str, tokenizer: PreTrainedTokenizerBase, objective: str, max_tokens: float
) -> Manifest:
    """Load the manifest; UserError if the tokenizer, or the objective or longest sequence of the model, do not fit."""
    manifest = Manifest.load(dataset_path)
    if objective != manifest.objective:
        what = f"this model is trained with the objective {objective}, but the data was made for {manifest.objective}"
        remedy = f"choose another model, or make other data with ./tokenize_wikitext103.py --objective {objective}"
        raise UserError(f"--model_name_or_path: {what}; {remedy}")
    size = vocabulary_size(tokenizer)
    if (tokenizer_sha256(tokenizer), size) != (manifest.tokenizer_sha256, manifest.vocab_size):
        made = f"the one that the data was made with ({manifest.tokenizer_class}, {manifest.vocab_size} tokens)"
        what = f"this tokenizer ({size} tokens) is not {made}"
        raise UserError(f"--tokenizer_path: {what}; take both from the same archive")
    if manifest.max_seq_length > max_tokens:
        what = f"the sequences have {manifest.max_seq_length} tokens, but the model has {max_tokens} positions"
        remedy = f"prepare the data with --max_seq_length {max_tokens}, or choose another --model_name_or_path"
        raise UserError(f"{what}: {remedy}")
    return manifest
