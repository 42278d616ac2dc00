#!/usr/bin/env python3
"""Compare the speed of data preparation with that of the usual recipe, and measure the start of monitor and trainer.

benchmarks/preparation.py                                            # 19 MB of made-up text
benchmarks/preparation.py --text wiki.test.tokens --megabytes 19 100 --repeat 3
benchmarks/preparation.py --start                                    # until a trainer has computed a gradient

The programs run alternately, each as a separate process: seconds include its start. The text repeats --text; in each
copy half of the rare words are replaced by new ones, so that the number of different words grows as it does in real
text.

The usual recipe prepares text for ALBERT as hivemind's example does it. Each line is a document. Its sentences are
tokenized one by one to count their tokens, until a sample is full; the pair of the two segments is then tokenized
again. `datasets.map` runs one process for each core. A regular expression finds the sentences, instead of a model that
needs a download.
"""

import argparse
import contextlib
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from benchmarks.process_usage import measure_cpu, measure_memory
from cotrain.preparation.sources import open_sample
from tests.support.peers import LOCAL, Script, Scripts, prepare_data
from tests.support.processes import ROOT

VOCAB_SIZE = 3000  # more than the sample text has cannot be trained
MAX_SEQ_LENGTH = 512
POLL_SECONDS = 0.5  # measuring the memory takes 10 ms
SETTLE_SECONDS = 3.0  # after the start, until the memory is measured
SENTENCE_END = re.compile(r"(?<=[.!?]) +")


def build_pairs(batch: dict, tokenizer, max_seq_length: int) -> dict[str, list]:
    """Build the samples of the usual recipe."""
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
                pair = pair[::-1] if is_swapped else pair
                sample = tokenizer(*pair, truncation=True, max_length=max_seq_length, return_special_tokens_mask=True)
                for name, values in sample.items():
                    samples.setdefault(name, []).append(values)
                samples["sentence_order_label"].append(int(is_swapped))
            segments, length = [], 0
    return samples


def prepare_as_usual(text: str, tokenizer_path: str, output: str) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes instead
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    dataset = Dataset.from_dict({"text": Path(text).read_text(encoding="utf-8").splitlines(keepends=True)})
    function = partial(build_pairs, tokenizer=tokenizer, max_seq_length=MAX_SEQ_LENGTH)
    dataset.map(function, batched=True, num_proc=os.cpu_count(), remove_columns=["text"]).save_to_disk(output)


def write_text(source: str, size: float, path: Path) -> None:
    """Write made-up text.

    :param source: text to repeat
    :param size: in characters
    """
    counts = Counter(source.split())
    rare = [word for word, count in counts.items() if count == 1 and len(word) > 4 and word.isalpha()]
    with path.open("w", encoding="utf-8") as file:
        written = copies = 0
        while written < size:
            generator = random.Random(copies)
            new = {word: "".join(generator.sample(word, len(word))) for word in rare if generator.random() < 0.5}
            lines = source.split("\n")
            if copies:
                lines = [" ".join(new.get(word, word) for word in line.split(" ")) for line in lines]
            written += file.write("\n".join(lines) + "\n")
            copies += 1


def run(command: list[object]) -> tuple[float, float]:
    """Run a program; return its seconds, and the peak memory of all its processes in MB."""
    started, peak = time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = psutil.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                family = [process, *process.children(recursive=True)]
                peak = max(peak, measure_memory(process.pid, family).total() / 1e6)
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(POLL_SECONDS)
        output.seek(0)
        if process.wait():
            sys.exit(f"{command[0]} failed:\n{output.read()}")
    return time.monotonic() - started, peak


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Print seconds and memory of the two programs for each size of the text."""
    source = args.text.read_text(encoding="utf-8") if args.text else "\n".join(open_sample().parts["train"][0]())
    text, tokenizer = folder / "text.txt", folder / "tokenizer"
    text.write_text(source, encoding="utf-8")
    paths = ("--tokenizer_path", tokenizer, "--output_path", folder / "dataset", "--cache_dir", folder / "cache")
    this = ["tokenize_wikitext103.py", "--train_file", text, "--row_is", "line", *paths, "--overwrite"]
    run([*this, "--train_tokenizer", "--vocab_size", VOCAB_SIZE])
    programs = {
        "this project": [*this, "--tokenizer", tokenizer],
        "usual recipe": [__file__, "--usual", text, tokenizer, folder / "usual"],
    }
    print(f"{'MB':>6}  {'program':<16}{'seconds':>22}{'ratio':>8}{'MB/s':>8}{'peak memory':>14}")
    for megabytes in args.megabytes:
        write_text(source, megabytes * 1e6, text)
        results = {name: [run(command) for _ in range(args.repeat)] for name, command in programs.items()}
        first = statistics.median(seconds for seconds, _ in results["this project"])
        for name, values in results.items():
            median = statistics.median(seconds for seconds, _ in values)
            spread = f"{median:.1f} ({min(values)[0]:.1f} to {max(values)[0]:.1f})"
            print(f"{megabytes:>6.0f}  {name:<16}{spread:>22}{median / first:>8.2f}{megabytes / median:>8.2f}", end="")
            print(f"{max(peak for _, peak in values):>11.0f} MB", flush=True)


def start_peers(folder: Path, repeat: int) -> None:
    """Print how long a monitor and a trainer take to start, and their memory: medians."""
    prepare_data(folder / "data")
    figures: dict[str, list[tuple[float, ...]]] = {"monitor": [], "trainer": []}
    for number in range(repeat):
        with contextlib.closing(Scripts(folder / str(number), folder / "data")) as scripts:
            scripts.folder.mkdir()
            began = time.monotonic()
            monitor = scripts.monitor()
            figures["monitor"].append(_measure(monitor, r"--initial_peers (/ip4/\S+)", began))
            began = time.monotonic()
            trainer = scripts.trainer("trainer", "--initial_peers", monitor.address, "--host_maddrs", LOCAL, pace=0.0)
            figures["trainer"].append(_measure(trainer, r"Local step 1:", began))
    print(f"{'':<10}{'ready':>9}{'CPU':>9}{'PSS':>12}{'USS':>12}")
    for name, rows in figures.items():
        seconds, cpu, pss, uss = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:<10}{seconds:>7.1f} s{cpu:>7.1f} s{pss:>9.0f} MB{uss:>9.0f} MB")


def _measure(script: Script, pattern: str, began: float) -> tuple[float, ...]:
    """Wait until a script is ready; return the seconds, its CPU seconds, and its memory in MB (PSS, USS)."""
    script.wait_for(pattern)
    seconds, main = time.monotonic() - began, script.process.pid
    cpu = measure_cpu(main, script.family()).total()
    time.sleep(SETTLE_SECONDS)
    return seconds, cpu, *(measure_memory(main, script.family(), kind).total() / 2**20 for kind in ("pss", "uss"))


def main() -> None:
    if sys.argv[1:2] == ["--usual"]:
        return prepare_as_usual(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="UTF-8, to be repeated; default: Python's documentation topics")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[19.0], help="sizes of the text; default: 19")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each program; default: 3")
    parser.add_argument("--start", action="store_true", help="measure the start of a monitor and a trainer instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="preparation-", ignore_cleanup_errors=True) as name:
        start_peers(Path(name), args.repeat) if args.start else compare(args, Path(name))


if __name__ == "__main__":
    main()
