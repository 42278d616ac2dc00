#!/usr/bin/env python3
"""Compare the speed of data preparation with that of the usual recipe, and with that of the encoder alone.

benchmarks/preparation.py                                            # 19 MB of made-up text
benchmarks/preparation.py --text wiki.test.tokens --megabytes 19 --repeat 3
benchmarks/preparation.py --megabytes 20,200,2000 --memory           # memory only

The programs run alternately, each as a separate process: seconds include its start. The text repeats
--text; in each copy half of the rare words are replaced by new ones, so that the number of different words grows as
it does in real text.
"""

import argparse
import contextlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from lib.data.corpus import open_sample

ROOT = Path(__file__).parent.parent
VOCAB_SIZE = 8000
POLL_SECONDS = 0.5  # measuring the memory takes 10 ms
TIMEOUT = 3600.0
SENTENCEPIECE = """\
import sys, time, sentencepiece
lines = [" ".join(line.lower().split()) for line in open(sys.argv[1], encoding="utf-8")]
model = sentencepiece.SentencePieceProcessor(model_file=sys.argv[2])
started = time.perf_counter()
model.encode(lines, out_type=int, num_threads=int(sys.argv[3]))
print(time.perf_counter() - started)
"""


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


def run(command: list[str]) -> tuple[float, float, str]:
    """Run a program; return its seconds, the peak memory of all its processes in MB, and its output."""
    started, peak = time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+") as output:
        process = psutil.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() < started + TIMEOUT:
                peak = max(peak, measure_memory(process))
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(POLL_SECONDS)
            seconds = time.monotonic() - started
        finally:
            if process.poll() is None:
                process.kill()
        output.seek(0)
        text = output.read()
    if process.wait():
        sys.exit(f"{' '.join(command)} failed:\n{text}")
    return seconds, peak, text


def measure_memory(process: psutil.Process) -> float:
    """Return the memory of a process and its children in MB, without pages of files, which the system may drop."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            status = Path(f"/proc/{member.pid}/status").read_text()
        except OSError:
            continue  # it has ended
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
    return total / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="UTF-8, to be repeated; default: Python's documentation topics")
    parser.add_argument("--megabytes", default="19", help="size of the made-up text, or several sizes; default: 19")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each program; default: 3")
    parser.add_argument("--memory", action="store_true", help="this project only, once for each size")
    parser.add_argument("--num_proc", type=int, default=psutil.cpu_count(), help="default: number of cores")
    args = parser.parse_args()
    source = args.text.read_text(encoding="utf-8") if args.text else "\n".join(open_sample().rows["train"]())
    folder = Path(tempfile.mkdtemp(prefix="preparation-"))
    try:
        tokenizer, model = train_tokenizer(source, folder)
        print(f"{'MB':>6}  {'program':<24}{'seconds':>22}{'ratio':>8}{'MB/s':>8}{'peak memory':>14}")
        for megabytes in map(float, args.megabytes.split(",")):
            text = folder / "text.txt"
            write_text(source, megabytes * 1e6, text)
            compare(args, megabytes, text, tokenizer, model, folder)
    finally:
        shutil.rmtree(folder)


def train_tokenizer(source: str, folder: Path) -> tuple[Path, Path]:
    """Train a tokenizer with this project, and a model of sentencepiece itself; return their paths."""
    text = folder / "source.txt"
    text.write_text(source, encoding="utf-8")
    train = [sys.executable, "tokenize_wikitext103.py", "--train_file", str(text), "--train_tokenizer"]
    train += ["--vocab_size", str(VOCAB_SIZE), "--tokenizer_path", str(folder / "tokenizer"), *paths(folder)]
    run(train)
    code = (
        "import sentencepiece, sys; sentencepiece.SentencePieceTrainer.train(input=sys.argv[1], "
        f"model_prefix=sys.argv[2], vocab_size={VOCAB_SIZE}, max_sentence_length=1000000, minloglevel=2)"
    )
    run([sys.executable, "-c", code, str(text), str(folder / "model")])
    return folder / "tokenizer", folder / "model.model"


def paths(folder: Path) -> list[str]:
    return ["--output_path", str(folder / "dataset"), "--cache_dir", str(folder / "cache"), "--overwrite"]


def compare(
    args: argparse.Namespace, megabytes: float, text: Path, tokenizer: Path, model: Path, folder: Path
) -> None:
    this = [sys.executable, "tokenize_wikitext103.py", "--train_file", str(text), "--tokenizer", str(tokenizer)]
    this += ["--tokenizer_path", str(tokenizer), "--num_proc", str(args.num_proc), *paths(folder)]
    usual = [sys.executable, "benchmarks/usual_recipe.py", "--text", str(text), "--tokenizer", str(tokenizer)]
    usual += ["--output", str(folder / "usual")]
    alone = [sys.executable, "-c", SENTENCEPIECE, str(text), str(model), str(args.num_proc)]
    programs = {"this project": this}
    if not args.memory:
        programs |= {"usual recipe": usual, "sentencepiece encoder": alone}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    memory: dict[str, float] = {}
    for _ in range(1 if args.memory else args.repeat):
        for name, command in programs.items():
            wall, memory[name], output = run(command)
            # The encoder's own time; the start of Python and the reading of the file are not counted.
            seconds[name].append(float(output.split()[-1]) if name.startswith("sentencepiece") else wall)
    first = statistics.median(seconds["this project"])
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = f"{median:.1f} ({min(values):.1f} to {max(values):.1f})"
        print(
            f"{megabytes:>6.0f}  {name:<24}{spread:>22}{median / first:>8.2f}{megabytes / median:>8.2f}"
            f"{memory[name]:>11.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
