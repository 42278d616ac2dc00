#!/usr/bin/env python3
"""Prepare text for ALBERT as hivemind's example does it; the baseline of benchmarks/preparation.py.

benchmarks/usual_recipe.py --text my.txt --tokenizer data/tokenizer --output samples

Each line is a document. Its sentences are tokenized one by one to count their tokens, until a sample is full; the pair
of the two segments is then tokenized again. `datasets.map` runs one process for each core. A regular expression finds
the sentences, instead of a model that needs a download.
"""

import argparse
import os
import random
import re
from functools import partial

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

SENTENCE_END = re.compile(r"(?<=[.!?]) +")


def build_pairs(batch: dict, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> dict[str, list]:
    samples: dict[str, list] = {"sentence_order_label": []}
    generator = random.Random(len(batch["text"]))
    for text in batch["text"]:
        segments, length = [], 0
        sentences = [sentence for sentence in SENTENCE_END.split(text.strip()) if sentence]
        for number, sentence in enumerate(sentences, start=1):
            segments.append(sentence)
            length += len(tokenizer.tokenize(sentence))
            if length < max_seq_length and number < len(sentences):
                continue
            if len(segments) > 1:
                middle = generator.randint(1, len(segments) - 1)
                pair = [" ".join(segments[:middle]), " ".join(segments[middle:])]
                is_swapped = generator.random() < 0.5
                sample = tokenizer(
                    *(reversed(pair) if is_swapped else pair),
                    truncation="longest_first",
                    max_length=max_seq_length,
                    return_special_tokens_mask=True,
                )
                for name, values in sample.items():
                    samples.setdefault(name, []).append(values)
                samples["sentence_order_label"].append(int(is_swapped))
            segments, length = [], 0
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--max_seq_length", type=int, default=512)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes instead
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    with open(args.text, encoding="utf-8") as file:
        dataset = Dataset.from_dict({"text": list(file)})
    function = partial(build_pairs, tokenizer=tokenizer, max_seq_length=args.max_seq_length)
    samples = dataset.map(function, batched=True, num_proc=os.cpu_count(), remove_columns=["text"])
    samples.save_to_disk(args.output)
    print(f"{len(samples)} samples")


if __name__ == "__main__":
    main()
