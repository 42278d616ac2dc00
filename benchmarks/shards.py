#!/usr/bin/env python3
"""Measure data in shards: the preparation, and trainers on lines as at home.

benchmarks/shards.py prepare FOLDER --text FILE --megabytes 100 400     # memory by size of the text
benchmarks/shards.py extend FOLDER --shards 12                          # more shards, with other tokens
benchmarks/shards.py join FOLDER                                        # three trainers, the whole archive, faults
benchmarks/shards.py loss FOLDER --text FILE --seeds 5                  # beside one archive, at equal samples

`prepare` repeats the text; in each copy half of the rare words are replaced by new ones. `join` runs real trainers of
a small GPT-2 in network namespaces behind rate limits (tc's token bucket filter), and needs root: the first has
a downlink of 112 Mbit/s, the second one of 37, and the third, which joins later, of 14.7. The second one is killed and
started again; then the server is away, and in the middle of that it is killed once more. `loss` trains a small GPT-2
for one pass on shards that differ in topics.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from benchmarks.preparation import write_text
from cotrain.data import archive
from cotrain.data.archive import DATASET, TOKENIZER, file_sha256, unpack_archive, write_archive
from tests.support.namespaces import Internet
from tests.support.peers import Script, wait_until
from tests.support.processes import PYTHON, ROOT, namespace_prefix

VOCAB_SIZE = 3000
LONGEST = 1200.0  # seconds to wait for anything
RATES = {"first": 112.0, "second": 37.3, "third": 14.7}  # Mbit/s of the downlinks; uplinks have 14.7
MODEL = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
SETTINGS = ("--objective", "clm", "--train_tokenizer", "--vocab_size", VOCAB_SIZE, "--max_seq_length", 128)


def anonymous_bytes(process: psutil.Process) -> int:
    """Return the memory of a process that is not a copy of a file, which the kernel can drop."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        return 1024 * sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)))
    return 0


def prepare(args: argparse.Namespace) -> None:
    """Print seconds and peak memory of the preparation for each size of the text."""
    source, text = args.text.read_text(encoding="utf-8"), args.folder / "text.txt"
    args.folder.mkdir(parents=True, exist_ok=True)
    print(f"{'MB of text':>10}{'shards':>8}{'MB to download':>16}{'seconds':>9}{'peak memory':>13}")
    for megabytes in args.megabytes:
        write_text(source, megabytes * 1e6, text)
        shutil.rmtree(args.folder / "public", ignore_errors=True)
        (args.folder / "public").mkdir()
        command = [
            "nice", "-n", "15", sys.executable, "tokenize_wikitext103.py", "--train_file", text, *SETTINGS,
            "--archive", args.folder / "public/data.tar.gz", "--shard_size", args.shard_size, "--overwrite",
            "--output_path", args.folder / "dataset", "--tokenizer_path", args.folder / "tokenizer",
            "--cache_dir", args.folder / "cache",
        ]  # fmt: skip
        peak, began = 0, time.monotonic()
        with open(args.folder / "prepare.log", "w", encoding="utf-8") as log:
            process = psutil.Popen([*map(str, command)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            while process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    family = [process, *process.children(recursive=True)]
                    peak = max(peak, sum(map(anonymous_bytes, family)))
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(0.5)
        assert process.wait() == 0, (args.folder / "prepare.log").read_text(encoding="utf-8")
        files = list((args.folder / "public").glob("*.tar.gz"))
        size, shards = sum(file.stat().st_size for file in files) / 1e6, len(files) - 1
        print(f"{megabytes:>10,.0f}{shards:>8}{size:>16,.0f}{time.monotonic() - began:>9.0f}{peak / 1e6:>10,.0f} MB")


def compress_fast() -> None:
    """Let this process write archives with gzip's lowest level, which takes a third of the time."""
    open_file = archive.gzip.GzipFile
    options = {"open": archive.gzip.open, "BadGzipFile": archive.gzip.BadGzipFile}
    archive.gzip = SimpleNamespace(GzipFile=lambda **named: open_file(**{**named, "compresslevel": 1}), **options)


def extend(args: argparse.Namespace) -> None:
    """Add shards to those of `prepare`: the same samples with permuted tokens, as of another language."""
    import numpy as np
    import pyarrow as pa

    from cotrain.data.manifest import Manifest, Shard

    compress_fast()

    public, work, dataset = args.folder / "public", args.folder / "extend", args.folder / "dataset"
    manifest = Manifest.load(dataset)
    originals = manifest.shards.copy()
    largest = max(shard.unpacked for shard in originals)
    originals = [shard for shard in originals if shard.unpacked > largest / 2]
    for number in range(len(manifest.shards), args.shards):
        shutil.rmtree(work, ignore_errors=True)
        (work / "new/train").mkdir(parents=True)
        (work / "old").mkdir()
        original = originals[number % len(originals)]
        unpack_archive(public / original.name, {DATASET: work / "old"})
        tokens = np.random.default_rng(number).permutation(manifest.vocab_size).astype(np.int32)
        with (
            pa.ipc.open_stream(work / "old" / original.file) as reader,
            pa.ipc.new_stream(work / f"new/train/data-{number:05d}.arrow", reader.schema) as writer,
        ):
            for batch in reader:
                ids = batch["input_ids"]
                new = pa.ListArray.from_arrays(ids.offsets, pa.array(tokens[ids.values.to_numpy()]))
                writer.write_batch(pa.record_batch([new, *batch.columns[1:]], schema=reader.schema))
        file, path = work / f"new/train/data-{number:05d}.arrow", public / f"data-{number:05d}.tar.gz"
        size, digest = file.stat().st_size, write_archive(path, {DATASET: work / "new"})
        manifest.shards.append(Shard(path.name, digest, path.stat().st_size, size, original.samples))
        manifest.splits["train"]["instances"] += original.samples
        manifest.save(dataset)
        print(f"{path.name}: {path.stat().st_size / 1e6:.0f} MB, {original.samples:,} samples", flush=True)
    write_archive(public / "data.tar.gz", {DATASET: dataset, TOKENIZER: args.folder / "tokenizer"})
    shutil.rmtree(work, ignore_errors=True)
    samples, size = sum(shard.samples for shard in manifest.shards), (args.folder / "text.txt").stat().st_size
    prepared = sum(split["tokens"] for split in manifest.splits.values())  # `extend` does not count its tokens here
    text = size * samples * manifest.max_seq_length / prepared
    print(f"{samples:,} samples, as many tokens as of {text / 1e6:,.0f} MB of text")


def pack_whole(folder: Path) -> Path:
    """Pack the samples of all shards into one archive, as without --shard_size, and return its path."""
    from cotrain.data.manifest import Manifest

    compress_fast()
    path, work = folder / "whole/data.tar.gz", folder / "whole/data"
    if not path.exists():
        shutil.copytree(folder / "dataset", work)
        manifest = Manifest.load(work)
        for shard in manifest.shards:
            unpack_archive(folder / "public" / shard.name, {DATASET: work})
        dataclasses.replace(manifest, shards=[]).save(work)
        write_archive(path, {DATASET: work, TOKENIZER: folder / "tokenizer"})
        shutil.rmtree(work)
    return path


def run_peer() -> None:
    """Run a trainer that appends the numbers of its samples to a file, as its order has them: `peer PACE FILE FLAGS`.

    A sample that it repeats since a shard is missing has the number -1.
    """
    import run_trainer
    from cotrain.common.errors import run_script
    from cotrain.data.sampler import PeerSampler
    from tests.support.altered import set_pace

    _, _, pace, path, *flags = sys.argv
    draw, file = PeerSampler.__iter__, open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def draw_and_record(order: PeerSampler) -> Iterator[int]:
        num_repeated = order.num_repeated
        for number in draw(order):
            file.write(f"{number if order.num_repeated == num_repeated else -1}\n")
            num_repeated = order.num_repeated
            yield number

    PeerSampler.__iter__ = draw_and_record
    set_pace(float(pace))
    sys.argv = ["run_trainer.py", *flags]
    run_script(run_trainer.main)


def join(args: argparse.Namespace) -> None:
    """Print when trainers begin, what they have on the disk, how long they wait and what they see twice."""
    base, run = args.folder / "public/data.tar.gz", args.folder / "run"
    whole = base if args.skip_archive else pack_whole(args.folder)
    caches, paces = (dict(zip(RATES, itertools.cycle(x), strict=False)) for x in (args.data_cache, args.pace))
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    (run / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    with contextlib.ExitStack() as stack:
        internet = stack.enter_context(Internet())
        server = internet.add_public()
        hosts = {name: internet.add_public() for name in RATES}
        for name, rate in RATES.items():
            internet.limit(hosts[name], 14.7, rate)

        def serve() -> subprocess.Popen:
            command = [*namespace_prefix(server.namespace), *PYTHON, "-m", "http.server", "8000"]
            process = subprocess.Popen(command, cwd=args.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.kill)
            return process

        def start(name: str, path: Path, *flags: object, folder: str = "") -> Script:
            place = run / (folder or name)
            data = ("--dataset_path", place / "data", "--tokenizer_path", place / "tokenizer")
            script = Script(
                "benchmarks/shards.py", "peer", paces[name], run / f"{folder or name}.numbers", "--run_id", "shards",
                "--model_name_or_path", run / "config.json", "--output_dir", place, *data, "--dataset_url",
                f"http://{server.address}:8000/{path.relative_to(args.folder)}", "--dataset_sha256", file_sha256(path),
                "--host_maddrs", f"/ip4/{hosts[name].address}/tcp/31337", "--target_batch_size",
                args.target_batch_size, "--optimizer", "adamw", "--learning_rate", 0.001, "--warmup_steps", 0,
                "--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 1, "--data_cache", caches[name],
                "--bootstrap_timeout", 300, *flags, log=run / f"{folder or name}.log", namespace=hosts[name].namespace,
                env={"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            stack.callback(script.kill_all)
            return script

        def begin(name: str, path: Path, *flags: object, folder: str = "") -> tuple[Script, float]:
            began = time.monotonic()
            script = start(name, path, *flags, folder=folder)
            script.wait_for("Local step 1:", LONGEST)
            return script, time.monotonic() - began

        def restart() -> None:
            trainers["second"].kill()
            flags = ("--initial_peers", trainers["first"].address)
            trainers["second"], seconds = begin("second", base, *flags, folder="second-shards")
            print(f"second, killed and started again: {seconds:.0f} s", flush=True)

        def status(name: str) -> str:
            return json.loads((run / name / "status.json").read_text(encoding="utf-8"))["data"]

        web = serve()
        wait_until(lambda: server_answers(server), 60, "the web server")
        print(f"{'trainer':<10}{'Mbit/s':>8}{'data':>10}{'first local step':>20}{'on the disk':>14}", flush=True)
        trainers = {}
        for name in RATES:
            flags = ("--initial_peers", trainers["first"].address) if trainers else ()
            for kind, path in (("archive", whole), ("shards", base)):
                if kind == "archive" and args.skip_archive:
                    continue
                other = () if kind == "shards" else ("--run_id", "whole")
                script, seconds = begin(name, path, *(flags if kind == "shards" else other), folder=f"{name}-{kind}")
                used = sum(x.stat().st_size for x in (run / f"{name}-{kind}/data").rglob("*") if x.is_file()) / 1e6
                print(f"{name:<10}{RATES[name]:>8}{kind:>10}{seconds:>18.0f} s{used:>11,.0f} MB", flush=True)
                if kind == "archive":
                    script.kill_all()
                    shutil.rmtree(run / f"{name}-archive")
                else:
                    trainers[name] = script
        time.sleep(args.seconds)
        restart()
        web.kill()
        print(f"the server is away for {args.away:.0f} s", flush=True)
        time.sleep(args.away / 2)
        restart()
        time.sleep(args.away / 2)
        web = serve()
        time.sleep(args.seconds)
        for name, script in trainers.items():
            numbers = (run / f"{name}-shards.numbers").read_text(encoding="utf-8").split()
            again = numbers.count("-1")
            twice = sum(count - 1 for number, count in Counter(numbers).items() if number != "-1")
            most = sum(x.stat().st_size for x in (run / f"{name}-shards/data").rglob("*") if x.is_file()) / 1e6
            print(f"{name}: {len(numbers) - again:,} samples, {twice} twice; {again:,} repeated; ", end="")
            print(f"{most:,.0f} MB on the disk; ", end="")
            print(status(f"{name}-shards"), flush=True)
            assert script.process.poll() is None, script.output[-500:]
        print(f"load average for each core: {os.getloadavg()[0] / os.cpu_count():.1f}")


def server_answers(server) -> bool:
    command = [
        *namespace_prefix(server.namespace),
        *PYTHON,
        "-c",
        "import socket; socket.create_connection(('127.0.0.1', 8000))",
    ]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def compare_losses(args: argparse.Namespace) -> None:
    """Print the validation loss after one pass, in the order of a peer on shards and on one archive."""
    import torch
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel

    import tokenize_wikitext103
    from cotrain.data.loading import load_split, open_samples
    from cotrain.data.sampler import PeerSampler

    torch.set_num_threads(1)
    folder = args.folder / "loss"
    flags = {"train_file": str(args.text), "objective": "clm", "train_tokenizer": True, "vocab_size": 2000,
             "max_seq_length": 64, "num_proc": 1, "shard_size": "150kB", "overwrite": True}  # fmt: skip
    (folder / "public").mkdir(parents=True, exist_ok=True)
    paths = {name: str(folder / name) for name in ("output_path", "tokenizer_path", "cache_dir")}
    paths["archive"] = str(folder / "public/data.tar.gz")
    manifest = tokenize_wikitext103.prepare(tokenize_wikitext103.TokenizationArguments(**flags, **paths))
    shards = manifest.shards
    shutil.rmtree(folder / "unpacked", ignore_errors=True)
    (folder / "unpacked").mkdir()
    for shard in shards:
        unpack_archive(folder / "public" / shard.name, {DATASET: folder / "unpacked"})
    files = [folder / "unpacked" / shard.file for shard in shards]
    samples = Dataset(open_samples(files, "clm", sum(shard.samples for shard in shards)))
    held_out = load_split(folder / "output_path", "validation")

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
        return {"input_ids": labels.clamp(min=0), "labels": labels}

    def measure(sampler: PeerSampler, seed: int) -> float:
        torch.manual_seed(seed)
        config = GPT2Config(vocab_size=2000, **{k: v for k, v in MODEL.items() if k != "model_type"})
        model = GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
        numbers = list(sampler)
        for start in range(0, len(numbers), 8):
            model(**collate([samples[number] for number in numbers[start : start + 8]])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [model(**collate([held_out[k] for k in range(start, min(start + 8, len(held_out)))])).loss.item()
                      for start in range(0, len(held_out), 8)]  # fmt: skip
        return statistics.fmean(losses)

    class Cache:
        """All shards are here."""

        def __init__(self, window: int):
            self.shards, self.window, self.here = shards, window, set(range(len(shards)))
            self.ask = self.start = lambda *_: None
            self.has = lambda _: True

        def __len__(self) -> int:
            return len(samples)

        def open_cache(self) -> "Cache":
            return self

    print(f"{len(samples):,} samples in {len(shards)} shards; loss on {len(held_out)} others")
    windows = {"archive": None, "window of 4": 4, "window of 1": 1}
    losses = {name: [] for name in windows}
    for seed in range(args.seeds):
        for name, window in windows.items():
            data = samples if window is None else Cache(window)
            losses[name].append(measure(PeerSampler(data, "peer", seed, 8), seed))
    for name, values in losses.items():
        differences = [100 * (a / b - 1) for a, b in zip(values, losses["archive"], strict=True)]
        spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
        print(f"{name:<12}{statistics.fmean(values):.4f}  {statistics.fmean(differences):+.2f} ± {spread:.2f} %")


def main() -> None:
    if sys.argv[1:2] == ["peer"]:
        return run_peer()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "extend", "join", "loss"])
    parser.add_argument("folder", type=Path, help="for the text and the shards")
    parser.add_argument("--text", type=Path, help="UTF-8, to be repeated")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[100.0, 500.0, 2000.0])
    parser.add_argument("--shard_size", default="256MB")
    parser.add_argument("--shards", type=int, default=12, help="number after `extend`")
    parser.add_argument("--data_cache", nargs="+", default=["2GB"], help="of all trainers, or of each")
    parser.add_argument("--target_batch_size", type=int, default=96)
    parser.add_argument("--pace", type=float, nargs="+", default=[0.2], help="seconds of a local step, of 8 samples")
    parser.add_argument("--seconds", type=float, default=120.0, help="between two events")
    parser.add_argument("--away", type=float, default=120.0, help="seconds for which the server is away")
    parser.add_argument("--skip_archive", action="store_true", help="do not begin with the whole archive")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    {"prepare": prepare, "extend": extend, "join": join, "loss": compare_losses}[args.what](args)


if __name__ == "__main__":
    main()
