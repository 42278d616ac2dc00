#!/usr/bin/env python3
"""Turn text into a tokenized dataset that every trainer can load. Run it once, on any machine:

    ./tokenize_wikitext103.py                                                   # WikiText-103, ALBERT's tokenizer
    ./tokenize_wikitext103.py --train_file my.txt --train_tokenizer --archive data.tar.gz
    ./tokenize_wikitext103.py --sample --train_tokenizer --vocab_size 2000      # nothing to download
    ./tokenize_wikitext103.py --objective clm --tokenizer gpt2 --output_path data/gpt2_tokenized_wikitext

The dataset and its manifest go to --output_path, the tokenizer to --tokenizer_path.
"""

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path

from arguments import TokenizationArguments, parse_arguments
from errors import UserError, run_script

DATASET_FILES = ("manifest.json", "dataset_dict.json")  # one of them marks a folder that --overwrite may replace
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def main() -> None:
    (args,) = parse_arguments([TokenizationArguments], __doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that temporary files are removed
    started = time.perf_counter()
    splits = prepare(args)
    print_summary(args, splits)
    if args.archive is not None:
        from archive import write_archive

        # These names, whatever the flags: unpacked in the project's folder, the data lies where trainers look for it.
        defaults = {field: TokenizationArguments.__dataclass_fields__[field].default for field in ("output_path", "tokenizer_path")}
        digest = write_archive(
            Path(args.archive),
            {defaults["output_path"]: Path(args.output_path), defaults["tokenizer_path"]: Path(args.tokenizer_path)},
        )
        print(f"Archive: {args.archive}\nSHA-256: {digest}")
    print(f"Done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    run_script(main)
