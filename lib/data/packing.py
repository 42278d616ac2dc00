"""Packing of text into samples: rows -> documents -> sentences -> token ids -> samples.

All functions are pure: no files, no processes, no global random state. Random choices depend on the seed, the split
and the document's number, so the result does not depend on how the work is divided among processes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import sentencex

from lib.common.objectives import DEFAULT_OBJECTIVE, OBJECTIVES
from lib.data.encoding import TextEncoder, divide
from lib.data.schema import SPLITS

# Maximum sizes, so that a file with a single long line needs no more memory or time than any other. The time of
# sentencex is quadratic in the length of a line: 5 ms for 20,000 characters, 12 s for 1,000,000. The longest articles
# of WikiText have about 150,000 characters. Books are split, which leaves the last sample of each part half full,
# 1 in 200.
MAX_LINE_CHARS = 20_000
MAX_DOCUMENT_CHARS = 250_000

# Token ids need 16 to 18 bits; masks and labels fit into a byte.
_IDS, _MASK = pa.list_(pa.int32()), pa.list_(pa.int8())
_COLUMN_TYPES = {
    "input_ids": _IDS,
    "token_type_ids": _MASK,
    "attention_mask": _MASK,
    "special_tokens_mask": _MASK,
    "sentence_order_label": pa.int8(),
}
SCHEMAS = {
    objective.name: pa.schema({column: _COLUMN_TYPES[column] for column in objective.columns})
    for objective in OBJECTIVES.values()
}

Sample = dict[str, np.ndarray | int]


@dataclass(frozen=True)
class PackingConfig:
    """Settings of the packing."""

    objective: str = DEFAULT_OBJECTIVE  # a key of OBJECTIVES
    max_seq_length: int = 512  # tokens, special tokens included
    seed: int = 0
    language: str = "en"  # ISO 639-1; determines where sentences end


@dataclass
class PackingStats:
    """Statistics of the packing. `tokens` includes special tokens; padding is not stored and not counted.

    The manifest stores the fields under these names, among them `instances` and `swapped_instances` for samples.
    """

    documents: int = 0
    sentences: int = 0  # for sentence order only: the other objectives do not split text into sentences
    instances: int = 0  # samples
    tokens: int = 0
    swapped_instances: int = 0  # samples
    unknown_tokens: int = 0
    dropped_documents: int = 0  # documents without a sample: fewer than two tokens
    dropped_tokens: int = 0

    def __add__(self, other: PackingStats) -> PackingStats:
        return PackingStats(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def packing_efficiency(self, max_seq_length: int) -> float:
        """Return the mean length of a sample as a fraction of `max_seq_length`."""
        return self.tokens / (max_seq_length * self.instances) if self.instances else 0.0


# --- rows -> documents -----------------------------------------------------------------------------------------------

_TITLE = re.compile(r"= [^=](?:.*[^=])? =")  # "= Title =", but not "= = Section = ="


def _is_title(previous: str, row: str, following: str) -> bool:
    """Whether a row of WikiText is the title of an article.

    Titles are between blank rows. Formulas are not: the test split has "= 1 henry and capacitance C =".
    """
    return row.startswith("= ") and not previous and not following and _TITLE.fullmatch(row) is not None


def _with_neighbours(rows: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    previous, row = "", None
    for following in itertools.chain(rows, [""]):
        if row is not None:
            yield previous, row, following
            previous = row
        row = following


def _cut_row(row: str) -> Iterable[str]:
    """Return the lines of a row, those that are too long in pieces."""
    if len(row) <= MAX_LINE_CHARS and "\n" not in row:
        return (row,)
    return itertools.chain.from_iterable(map(_cut_line, row.split("\n")))


def _cut_line(line: str) -> Iterator[str]:
    """Split a line into pieces of at most MAX_LINE_CHARS characters, at spaces if possible."""
    while len(line) > MAX_LINE_CHARS:
        cut = line.rfind(" ", 1, MAX_LINE_CHARS) + 1 or MAX_LINE_CHARS
        yield line[:cut].strip()
        line = line[cut:]
    yield line.strip()


def split_documents(rows: Iterable[str]) -> Iterator[str]:
    """Group rows of text into documents.

    A row is a line, or a whole document of several lines. Lines are grouped into documents
    - by article, if the first line is a title of WikiText (" = Title = " between blank lines),
    - otherwise up to the next blank line,
    - in any case up to MAX_DOCUMENT_CHARS: BookCorpus has one sentence per row and no separators between books.

    :returns: non-empty documents: stripped non-blank lines joined by newlines
    """
    lines: list[str] = []
    size = 0
    is_wikitext = None  # not known before the first line
    for previous, row, following in _with_neighbours(row.strip() for row in rows):
        is_title = _is_title(previous, row, following)
        if is_wikitext is None and row:
            is_wikitext = is_title
        is_document = "\n" in row
        if lines and (is_document or (is_title if is_wikitext else not row)):
            yield "\n".join(lines)
            lines, size = [], 0
        for line in _cut_row(row):
            if lines and size + len(line) > MAX_DOCUMENT_CHARS:
                yield "\n".join(lines)
                lines, size = [], 0
            if line:
                lines.append(line)
                size += len(line)
        if lines and is_document:
            yield "\n".join(lines)
            lines, size = [], 0
    if lines:
        yield "\n".join(lines)


def hold_out(num_documents: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Select documents for validation if the source has no validation split.

    :param fraction: fraction of the documents to select; at least one document is selected
    :returns: numbers of the documents for training and for validation, each in ascending order
    :raises ValueError: if there are fewer than two documents
    """
    if num_documents < 2:
        raise ValueError("at least two documents are needed to hold one out")
    num_held_out = min(max(1, round(fraction * num_documents)), num_documents - 1)
    generator = np.random.default_rng([seed, num_documents])
    held_out = np.sort(generator.choice(num_documents, size=num_held_out, replace=False))
    return np.setdiff1d(np.arange(num_documents), held_out), held_out


def group_documents(lengths: Sequence[int], group_chars: int = 500_000) -> list[tuple[int, int]]:
    """Divide documents into groups of about `group_chars` characters, each of which is tokenized and packed at once.

    Groups depend on the text only, not on the number of processes. A sample may span documents of one group (unless
    the objective has sentence order), but never two groups.

    :param lengths: characters in each document
    :returns: for each group, the number of its first document and of the document after its last
    """
    groups = []
    start, size = 0, 0
    for stop, length in enumerate(lengths, start=1):
        size += length
        if size >= group_chars or stop == len(lengths):
            groups.append((start, stop))
            start, size = stop, 0
    return groups


# --- documents -> sentences ------------------------------------------------------------------------------------------


def split_sentences(document: str, language: str = "en") -> list[str]:
    """Split a document into sentences. The end of a line ends a sentence.

    Uses Wikimedia's sentencex: it needs no download (nltk's punkt does), handles abbreviations, tokenized text (" . ")
    and plain text, preserves all characters, and processes 60 MB/s (blingfire and nupunkt: 20 MB/s).
    """
    sentences: list[str] = []
    for line in document.split("\n"):
        begins = len(sentences)
        for sentence in sentencex.segment(language, line):
            # WikiText writes 3.5 as "3 @.@ 5", which does not end a sentence.
            if sentence.startswith("@") and len(sentences) > begins:
                sentences[-1] += sentence
            else:
                sentences.append(sentence)
    return [stripped for sentence in sentences if (stripped := sentence.strip())]


# --- token ids -> samples --------------------------------------------------------------------------------------------


def _cut_points(num_tokens: int, capacity: int) -> list[int]:
    """Return where to split `num_tokens` into as few chunks of at most `capacity` as possible, both ends included.

    All chunks but the last are full. If the last one would be short, the last two have equal lengths: two halves make
    better sentence pairs than 509 tokens and 3.
    """
    points = [*range(0, num_tokens, capacity), num_tokens]
    if len(points) > 2 and points[-1] - points[-2] < max(2, capacity // 8):
        points[-2] = (points[-3] + points[-1]) // 2
    return points


def pack_pairs(
    document: np.ndarray,
    sentence_lengths: np.ndarray,
    max_seq_length: int,
    cls_id: int,
    sep_id: int,
    generator: np.random.Generator,
) -> Iterator[Sample]:
    """Pack one document into [CLS] A [SEP] B [SEP] for masked LM and sentence-order prediction, as ALBERT does.

    ALBERT (https://arxiv.org/abs/1909.11942, sections 3.1 and 4.1) takes consecutive sentences until the sample is
    full, splits them at a random sentence into A and B, and swaps A and B with probability 1/2. Its code then
    truncates samples that are too long. Here nothing is truncated: the rest of a sentence that does not fit begins the
    next sample. So the number of samples is minimal, and the concatenated unswapped samples are the document.

    :param document: token ids of the document
    :param sentence_lengths: tokens in each of its sentences
    :returns: samples with the columns of the objective mlm_sop; `sentence_order_label` is 1 if A and B are swapped,
        as in AlbertForPreTraining. No sample if the document has fewer than two tokens
    """
    if len(document) < 2:
        return
    starts = np.cumsum(sentence_lengths)  # positions of the second sentence, the third, ...
    for begin, end in itertools.pairwise(_cut_points(len(document), capacity=max_seq_length - 3)):
        first, last = np.searchsorted(starts, [begin + 1, end])
        # A chunk within one long sentence is split at any token.
        middle = starts[generator.integers(first, last)] if first < last else generator.integers(begin + 1, end)
        a, b = document[begin:middle], document[middle:end]
        swapped = int(generator.random() < 0.5)
        if swapped:
            a, b = b, a
        input_ids = np.concatenate([[cls_id], a, [sep_id], b, [sep_id]], dtype=np.int32)
        token_type_ids = np.zeros(len(input_ids), dtype=np.int8)
        token_type_ids[len(a) + 2 :] = 1
        special_tokens_mask = np.zeros(len(input_ids), dtype=np.int8)
        special_tokens_mask[[0, len(a) + 1, -1]] = 1
        yield {
            "input_ids": input_ids,
            "token_type_ids": token_type_ids,
            "attention_mask": np.ones(len(input_ids), dtype=np.int8),
            "special_tokens_mask": special_tokens_mask,
            "sentence_order_label": swapped,
        }


def _join(documents: Sequence[np.ndarray], separator: int) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the documents that have tokens, with a separator after each.

    :returns: the tokens, and whether each is a separator
    """
    parts = [(document, [separator]) for document in documents if len(document)]
    text = np.concatenate([[], *itertools.chain.from_iterable(parts)]).astype(np.int32)
    is_separator = np.zeros(len(text), dtype=np.int8)
    is_separator[np.cumsum([len(document) + 1 for document, _ in parts], dtype=np.int64) - 1] = 1
    return text, is_separator


def pack_full_sequences(
    documents: Sequence[np.ndarray], max_seq_length: int, cls_id: int, sep_id: int
) -> Iterator[Sample]:
    """Pack documents into [CLS] text [SEP] for masked LM, as RoBERTa does.

    The format is FULL-SENTENCES (https://arxiv.org/abs/1907.11692, section 4.2): samples cross document boundaries,
    which are marked by [SEP]. All samples but the last are full.

    :param documents: token ids of each document
    :returns: samples with the columns of the objective mlm
    """
    text, is_separator = _join(documents, sep_id)
    begin, stop = 0, len(text) - 1  # the last [SEP] is not text: each sample gets one
    while begin < stop:
        begin += int(is_separator[begin])  # no separator at the start of a sample
        end = min(begin + max_seq_length - 2, stop)
        input_ids = np.concatenate([[cls_id], text[begin:end], [sep_id]], dtype=np.int32)
        yield {
            "input_ids": input_ids,
            "attention_mask": np.ones(len(input_ids), dtype=np.int8),
            "special_tokens_mask": np.concatenate([[1], is_separator[begin:end], [1]], dtype=np.int8),
        }
        begin = end


def pack_contiguous(documents: Sequence[np.ndarray], max_seq_length: int, eos_id: int) -> Iterator[Sample]:
    """Pack documents for causal LM, as GPT-2 does: add an end-of-text token to each, concatenate, split into blocks.

    :param documents: token ids of each document
    :returns: samples with the columns of the objective clm. All but the last are full. A last sample of a single
        token, which predicts nothing, is dropped
    """
    text, _ = _join(documents, eos_id)
    for begin in range(0, len(text) - 1, max_seq_length):
        input_ids = text[begin : begin + max_seq_length]
        yield {"input_ids": input_ids, "attention_mask": np.ones(len(input_ids), dtype=np.int8)}


def build_samples(
    documents: list[str], numbers: Iterable[int], split: str, encoder: TextEncoder, config: PackingConfig
) -> tuple[pa.Table, PackingStats]:
    """Tokenize a group of documents and pack them.

    :param documents: text of each document
    :param numbers: number of each document within its split
    :returns: the samples in the order of the text, with the columns of SCHEMAS[config.objective]; the statistics
    """
    stats, tokenizer = PackingStats(documents=len(documents)), encoder.tokenizer
    capacity, cls_id, sep_id = config.max_seq_length, tokenizer.cls_token_id, tokenizer.sep_token_id
    if OBJECTIVES[config.objective].has_sentence_order:
        sentences = [split_sentences(document, config.language) for document in documents]
        stats.sentences = sum(map(len, sentences))
        encoded = encoder.encode(list(itertools.chain.from_iterable(sentences)))
        lengths = divide(encoded.lengths, [len(document) for document in sentences])
        ids = divide(encoded.ids, [int(document.sum()) for document in lengths])
        samples = []
        for number, document, sentence_lengths in zip(numbers, ids, lengths, strict=True):
            generator = np.random.default_rng([config.seed, SPLITS.index(split), number])
            packed = list(pack_pairs(document, sentence_lengths, capacity, cls_id, sep_id, generator))
            if not packed:
                stats.dropped_documents += 1
                stats.dropped_tokens += len(document)
            samples += packed
        stats.swapped_instances = sum(sample["sentence_order_label"] for sample in samples)
    else:
        encoded = encoder.encode(documents)
        ids = encoded.split()
        if OBJECTIVES[config.objective].is_causal:
            samples = list(pack_contiguous(ids, capacity, tokenizer.eos_token_id))
            num_tokens = len(encoded.ids) + np.count_nonzero(encoded.lengths)
            stats.dropped_tokens = int(num_tokens) - sum(len(sample["input_ids"]) for sample in samples)
        else:
            samples = list(pack_full_sequences(ids, capacity, cls_id, sep_id))
        stats.dropped_documents = int(np.count_nonzero(encoded.lengths == 0))

    table = _build_table(samples, SCHEMAS[config.objective])
    # `to_numpy` would import pandas
    tokens = np.frombuffer(table["input_ids"].chunk(0).values.buffers()[1], dtype=np.int32)
    stats.instances, stats.tokens = len(samples), len(tokens)
    # GPT-2 has no unknown tokens; its `unk_token` is the end-of-text token.
    if tokenizer.unk_token_id != tokenizer.eos_token_id:
        stats.unknown_tokens = int(np.count_nonzero(tokens == tokenizer.unk_token_id))
    return table, stats


def _build_table(samples: Sequence[Sample], schema: pa.Schema) -> pa.Table:
    columns = []
    for field in schema:
        values = [sample[field.name] for sample in samples]
        if pa.types.is_list(field.type):
            # 100 times as fast as pa.array(values)
            offsets = pa.py_buffer(np.cumsum([0, *map(len, values)], dtype=np.int32))
            empty = np.zeros(0, dtype=field.type.value_type.to_pandas_dtype())
            flat = _build_array(np.concatenate([empty, *values]), field.type.value_type)
            columns.append(pa.Array.from_buffers(field.type, len(values), [None, offsets], children=[flat]))
        else:
            columns.append(_build_array(np.array(values), field.type))
    return pa.table(columns, schema=schema)


def _build_array(values: np.ndarray, type_: pa.DataType) -> pa.Array:
    # pa.array(values) would import pandas: half a second
    values = values.astype(type_.to_pandas_dtype(), copy=False)
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])
