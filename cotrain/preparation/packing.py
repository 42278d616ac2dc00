"""Packing of documents into samples: documents -> sentences -> token ids -> samples.

All functions are pure. Random choices depend on the seed and the document, so the result does not depend on how the
work is divided among processes.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa
import sentencex

from cotrain.data.schemas import SCHEMAS
from cotrain.models.objectives import DEFAULT_OBJECTIVE, OBJECTIVES
from cotrain.preparation.encoding import TextEncoder, leading_ids

# Lines, or 20,000 characters of one, cut at spaces if possible: the time of sentencex is quadratic in the length.
_LINES = re.compile(r"[^\n]{1,20000}$|[^\n]{1,19999} |[^\n]{1,20000}", re.MULTILINE)
# For these, sentencex finds no sentence: Thai has no full stops, but writes a space after a sentence or clause.
_ENDS = {"th": re.compile(r"(?<=\S{12}) +(?=\S{12})"), "km": re.compile(r"(?<=[។៕!?])\s+")}
_EMPTY = np.zeros(0, dtype=np.int32)
Sample = dict[str, np.ndarray | int]


@dataclass(frozen=True)
class PackingConfig:
    """Settings of the packing."""

    objective: str = DEFAULT_OBJECTIVE  # a key of OBJECTIVES
    max_seq_length: int = 512  # tokens, special tokens included
    seed: int = 0
    language: str = "en"  # a code in languages.txt; determines where sentences end


@dataclass
class PackingStats:
    """Statistics of the packing, as the manifest stores them. `tokens` includes special tokens."""

    documents: int = 0
    sentences: int = 0  # for sentence order only: the other objectives do not split text into sentences
    instances: int = 0  # samples
    tokens: int = 0
    unknown_tokens: int = 0
    truncated_documents: int = 0  # conversations whose last answer does not end within a sample
    dropped_documents: int = 0  # documents without a sample: fewer than two tokens, or no answer
    dropped_tokens: int = 0
    dropped_reasoning: int = 0  # answers whose reasoning the chat template leaves out
    dropped_messages: int = 0  # messages that are no answers, which the chat template leaves out
    # Of conversations, not in the manifest:
    faults: list[str] = field(default_factory=list)  # of those that the chat template does not take
    long: list[int] = field(default_factory=list)  # tokens to the last answer of each that is too long

    def __add__(self, other: PackingStats) -> PackingStats:
        return PackingStats(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def counts(self) -> dict[str, int]:
        """Return the numbers for the manifest: of what the chat template drops only if there is some."""
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int)}
        rare = ("dropped_reasoning", "dropped_messages")
        return {name: value for name, value in numbers.items() if value or name not in rare}


def split_sentences(document: str, language: str = "en") -> list[str]:
    """Split a document into sentences. The end of a line ends a sentence.

    Wikimedia's sentencex needs no download (nltk's punkt does), handles tokenized text (" . ") and plain text,
    preserves all characters, and processes 60 MB/s (blingfire and nupunkt: 20 MB/s).

    :param language: a code in languages.txt
    """
    sentences: list[str] = []
    for line in _LINES.findall(document):
        begins = len(sentences)
        for sentence in _ENDS[language].split(line) if language in _ENDS else sentencex.segment(language, line):
            # WikiText writes 3.5 as "3 @.@ 5", which does not end a sentence.
            if sentence.startswith("@") and len(sentences) > begins:
                sentences[-1] += sentence
            else:
                sentences.append(sentence)
    return [stripped for sentence in sentences if (stripped := sentence.strip())]


def _cut_points(num_tokens: int, capacity: int) -> list[int]:
    """Return where to split `num_tokens` into as few chunks of at most `capacity` as possible, both ends included.

    If the last chunk would be short, the last two have equal lengths: they make better pairs than 509 tokens and 3.
    """
    points = [*range(0, num_tokens, capacity), num_tokens]
    if len(points) > 2 and points[-1] - points[-2] < max(2, capacity // 8):
        points[-2] = (points[-3] + points[-1]) // 2
    return points


def _to_sample(input_ids: np.ndarray, *special_ids: int) -> Sample:
    """Return what the token ids of a sample tell: the encoder gives no special token for text."""
    mask = np.isin(input_ids, special_ids).astype(np.int8)
    return {"input_ids": input_ids, "attention_mask": np.ones_like(mask), "special_tokens_mask": mask}


def pack_pairs(
    sentences: Sequence[np.ndarray], max_seq_length: int, cls_id: int, sep_id: int, seed: int
) -> Iterator[Sample]:
    """Pack one document into [CLS] A [SEP] B [SEP] for masked LM and sentence-order prediction, as ALBERT does.

    ALBERT (https://arxiv.org/abs/1909.11942, sections 3.1 and 4.1) takes consecutive sentences until the sample is
    full, splits them at a random sentence into A and B, and swaps A and B with probability 1/2. Its code then
    truncates samples that are too long. Here nothing is truncated: the rest of a sentence that does not fit begins the
    next sample. So the number of samples is minimal, and the concatenated unswapped samples are the document.

    :param sentences: token ids of each sentence of the document
    :returns: samples; `sentence_order_label` is 1 if A and B are swapped. None if there are fewer than two tokens
    """
    document = np.concatenate([_EMPTY, *sentences])
    if len(document) < 2:
        return
    generator = np.random.default_rng([seed, zlib.crc32(document)])
    starts = np.cumsum([len(sentence) for sentence in sentences])  # positions of the second sentence, the third, ...
    for begin, end in itertools.pairwise(_cut_points(len(document), capacity=max_seq_length - 3)):
        first, last = np.searchsorted(starts, [begin + 1, end])
        # A chunk within one long sentence is split at any token.
        middle = starts[generator.integers(first, last)] if first < last else generator.integers(begin + 1, end)
        a, b = document[begin:middle], document[middle:end]
        swapped = int(generator.random() < 0.5)
        a, b = (b, a) if swapped else (a, b)
        input_ids = np.concatenate([[cls_id], a, [sep_id], b, [sep_id]], dtype=np.int32)
        token_type_ids = np.repeat(np.array([0, 1], dtype=np.int8), [len(a) + 2, len(b) + 1])
        order = {"token_type_ids": token_type_ids, "sentence_order_label": swapped}
        yield _to_sample(input_ids, cls_id, sep_id) | order


def _join(documents: Iterable[np.ndarray], separator: int) -> np.ndarray:
    """Concatenate documents that are not empty, with a separator after each."""
    parts = ((document, [separator]) for document in documents if len(document))
    return np.concatenate([_EMPTY, *itertools.chain.from_iterable(parts)], dtype=np.int32)


def pack_full_sequences(
    documents: Iterable[np.ndarray], max_seq_length: int, cls_id: int, sep_id: int
) -> Iterator[Sample]:
    """Pack documents into [CLS] text [SEP] for masked LM, as RoBERTa does.

    The format is FULL-SENTENCES (https://arxiv.org/abs/1907.11692, section 4.2): samples cross document boundaries,
    which are marked by [SEP]. All samples but the last are full.
    """
    text = _join(documents, sep_id)
    begin, stop = 0, len(text) - 1  # the last [SEP] is not text: each sample gets one
    while begin < stop:
        begin += int(text[begin] == sep_id)  # no separator at the start of a sample
        end = min(begin + max_seq_length - 2, stop)
        yield _to_sample(np.concatenate([[cls_id], text[begin:end], [sep_id]], dtype=np.int32), cls_id, sep_id)
        begin = end


def pack_contiguous(documents: Iterable[np.ndarray], max_seq_length: int, eos_id: int) -> Iterator[Sample]:
    """Pack documents for causal LM, as GPT-2 does: add an end-of-text token to each, concatenate, split into blocks.

    All samples but the last are full. A last sample of a single token, which predicts nothing, is dropped.
    """
    text = _join(documents, eos_id)
    for begin in range(0, len(text) - 1, max_seq_length):
        yield _to_sample(text[begin : begin + max_seq_length])


def cut_conversation(ids: np.ndarray, learnt: np.ndarray, max_seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a conversation that is too long after the last answer that fits whole; before all if there is none."""
    if len(ids) > max_seq_length:
        ends = np.flatnonzero(np.diff(learnt, append=np.int8(0)) == -1) + 1
        stop = max(ends[ends <= max_seq_length], default=0)
        return ids[:stop], learnt[:stop]
    return ids, learnt


def pack_conversations(
    conversations: Iterable[tuple[np.ndarray, np.ndarray]], max_seq_length: int
) -> Iterator[Sample]:
    """Pack whole conversations, the longest first, each into the first sample that has room.

    :param conversations: token ids and mask of the answers of each; none is longer than `max_seq_length`
    :returns: samples; `start_mask` is 1 at the first token of each conversation
    """
    bins: list[list[tuple[np.ndarray, np.ndarray]]] = []
    rooms: list[int] = []
    for conversation in sorted(conversations, key=lambda pair: -len(pair[0])):
        size = len(conversation[0])
        index = next((index for index, room in enumerate(rooms) if room >= size), len(bins))
        if index == len(bins):
            bins.append([])
            rooms.append(max_seq_length)
        bins[index].append(conversation)
        rooms[index] -= size
    for index in np.random.default_rng(0).permutation(len(bins)):  # an evaluator may use the first samples alone
        ids, answers = map(np.concatenate, zip(*bins[index], strict=True))
        starts = np.concatenate([np.arange(len(part)) == 0 for part, _ in bins[index]]).astype(np.int8)
        yield _to_sample(ids) | {"answer_mask": answers, "start_mask": starts}


def build_samples(documents: list, encoder: TextEncoder, config: PackingConfig) -> tuple[pa.Table, PackingStats]:
    """Tokenize a group of documents and pack them into samples, in the order of the text.

    :param documents: texts; of conversations token ids and masks, see `encode_conversation`
    """
    objective, capacity, schema = OBJECTIVES[config.objective], config.max_seq_length, SCHEMAS[config.objective]
    cls_id, sep_id, eos_id = (getattr(encoder.tokenizer, f"{name}_token_id") for name in ("cls", "sep", "eos"))
    if objective.has_answers:
        encoded = [[ids] for ids, _ in documents]
        long = [end for _, mask in documents if (end := len(np.trim_zeros(mask, "b"))) > capacity]
    else:
        texts = [split_sentences(x, config.language) if objective.has_sentence_order else [x] for x in documents]
        ids = iter(encoder.encode(list(itertools.chain.from_iterable(texts))))
        encoded = [list(itertools.islice(ids, len(text))) for text in texts]
    is_text = objective.is_causal and not objective.has_answers
    leading = leading_ids(encoder.tokenizer) if is_text else []
    sizes = [sum(map(len, text)) for text in encoded]
    dropped = sum(size <= objective.has_sentence_order for size in sizes)  # a pair has two tokens
    if objective.has_answers:
        cut = [cut_conversation(*document, capacity) for document in documents]
        cut = [(ids, mask) for ids, mask in cut if mask.any()]
        samples, dropped = list(pack_conversations(cut, capacity)), len(documents) - len(cut)
    elif objective.has_sentence_order:
        pairs = (pack_pairs(text, capacity, cls_id, sep_id, config.seed) for text in encoded)
        samples = list(itertools.chain.from_iterable(pairs))
    elif objective.is_causal:
        texts = (np.array([*leading, *ids], dtype=np.int32) if leading else ids for (ids,) in encoded if len(ids))
        samples = list(pack_contiguous(texts, capacity, eos_id))
    else:
        samples = list(pack_full_sequences(itertools.chain.from_iterable(encoded), capacity, cls_id, sep_id))
    kept = sum(int(np.count_nonzero(sample["special_tokens_mask"] == 0)) for sample in samples)
    stats = PackingStats(
        documents=len(documents),
        sentences=sum(map(len, encoded)) if objective.has_sentence_order else 0,
        instances=len(samples),
        tokens=sum(len(sample["input_ids"]) for sample in samples),
        unknown_tokens=sum(int(np.count_nonzero(x["input_ids"] == encoder.unknown_id)) for x in samples),
        truncated_documents=len(long) if objective.has_answers else 0,
        dropped_documents=dropped,
        dropped_tokens=sum(size + len(leading) + is_text for size in sizes if size) - kept,
        long=long if objective.has_answers else [],
    )
    return pa.table({name: [sample[name] for sample in samples] for name in schema.names}, schema=schema), stats
