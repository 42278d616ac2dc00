#!/usr/bin/env python3
"""Compare the fill and the lost tokens of this project's packing with those of hivemind's ALBERT example.

benchmarks/packing.py --text wiki.test.tokens
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from lib.data.corpus import read_text_file
from lib.data.encoding import build_encoder
from lib.data.packing import pack_pairs, split_documents, split_sentences
from lib.data.tokenizer_training import train_tokenizer
from lib.data.tokenizers import load_tokenizer

Sentences = list[list[int]]


def pack_lines(lines: Sequence[Sentences], max_seq_length: int) -> tuple[int, int]:
    """Count the samples of hivemind's ALBERT example, which treats each line of the file as a document.

    Sentences of one line are collected until `max_seq_length` is reached or the line ends. Two or more sentences form
    a sample, which is truncated if it is too long; a single sentence is dropped.

    :returns: number of samples; number of their tokens, without special tokens
    """
    capacity = max_seq_length - 3
    samples = tokens = 0
    for sentences in lines:
        chunk: list[int] = []  # lengths of the sentences in the chunk
        for number, sentence in enumerate(sentences, start=1):
            chunk.append(len(sentence))
            if sum(chunk) >= max_seq_length or number == len(sentences):
                if len(chunk) > 1:
                    samples += 1
                    tokens += min(sum(chunk), capacity)
                chunk = []
    return samples, tokens


def pack_articles(articles: Sequence[Sentences], max_seq_length: int) -> tuple[int, int]:
    """Count the samples of this project, see `lib.data.packing.pack_pairs`; same result as for `pack_lines`."""
    samples = tokens = 0
    for sentences in articles:
        document = np.array(list(itertools.chain.from_iterable(sentences)), dtype=np.int32)
        lengths = np.array([len(sentence) for sentence in sentences])
        for sample in pack_pairs(document, lengths, max_seq_length, 0, 0, np.random.default_rng(0)):
            samples += 1
            tokens += len(sample["input_ids"]) - 3
    return samples, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", required=True, help="Text file, UTF-8")
    parser.add_argument("--tokenizer", help="Tokenizer: a folder or a name on the Hub. Default: train one on the text")
    parser.add_argument("--vocab_size", type=int, default=8000, help="Vocabulary size of the trained tokenizer")
    parser.add_argument("--max_seq_length", type=int, default=512)
    args = parser.parse_args()

    documents = list(split_documents(read_text_file(args.text)))
    if args.tokenizer is None:
        tokenizer = train_tokenizer(documents, "sentencepiece", "mlm_sop", args.vocab_size, args.max_seq_length)
    else:
        tokenizer = load_tokenizer(args.tokenizer, "--tokenizer", "pass another", use_hub=True)

    started = time.perf_counter()
    lines = [split_sentences(line) for document in documents for line in document.split("\n")]
    encoder = build_encoder(tokenizer)
    ids = (sentence.tolist() for sentence in encoder.encode(list(itertools.chain.from_iterable(lines))).split())
    encoded_lines = [list(itertools.islice(ids, len(line))) for line in lines]
    seconds = time.perf_counter() - started
    rest = iter(encoded_lines)
    articles = [
        list(itertools.chain.from_iterable(itertools.islice(rest, document.count("\n") + 1))) for document in documents
    ]
    num_tokens = sum(len(sentence) for sentences in articles for sentence in sentences)

    num_chars = sum(map(len, documents))
    print(f"{len(documents)} documents, {len(lines)} lines, {num_tokens:,} tokens of {tokenizer.vocab_size}")
    print(f"sentences and tokens in {seconds:.1f} s: {num_chars / seconds / 1e6:.2f} million characters a second")
    print(f"{'':<24}{'samples':>10}{'mean fill':>12}{'tokens lost':>14}")
    for name, pack, texts in (
        ("line by line (older)", pack_lines, encoded_lines),
        ("article by article", pack_articles, articles),
    ):
        samples, tokens = pack(texts, args.max_seq_length)
        fill = (tokens + 3 * samples) / (args.max_seq_length * samples) if samples else 0
        lost = num_tokens - tokens
        print(f"{name:<24}{samples:>10,}{fill:>12.1%}{lost:>9,} ({lost / num_tokens:.1%})")


if __name__ == "__main__":
    main()
