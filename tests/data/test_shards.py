"""Data in shards: their preparation, a peer's order of them, and the cache on the disk."""

import contextlib
import dataclasses
import itertools
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

import tokenize_wikitext103
from arguments import DatasetArguments, ModelArguments
from cotrain.common.errors import UserError
from cotrain.common.flags import format_size, parse_size
from cotrain.data import download, sampler, shards
from cotrain.data.archive import DATASET, TOKENIZER, file_sha256, write_archive
from cotrain.data.download import fetch_data
from cotrain.data.loading import load_split
from cotrain.data.manifest import FORMAT_VERSION, Manifest
from cotrain.data.sampler import PeerSampler
from cotrain.data.shards import ShardCache, ShardedSamples
from cotrain.options import NOTHING
from cotrain.preparation import saving
from cotrain.preparation.corpus import open_corpus, read_corpus
from cotrain.preparation.sources import open_dataset
from invite import InvitationArguments, invite
from peerstep.peer.threads import PeriodicThread
from tests.data.test_download import Host
from tests.support.peers import wait_until
from tokenize_wikitext103 import TokenizationArguments

FLAGS = {"sample": True, "train_tokenizer": True, "vocab_size": 500, "max_seq_length": 32, "num_proc": 1}
SECONDS = 60


def prepare(folder: Path, **flags: object) -> Manifest:
    """Prepare data in a folder, the shards and their archive in `public`."""
    (folder / "public").mkdir(parents=True, exist_ok=True)
    paths = {name: str(folder / name) for name in ("output_path", "tokenizer_path", "cache_dir")}
    paths["archive"] = str(folder / "public/data.tar.gz")
    manifest = tokenize_wikitext103.prepare(TokenizationArguments(**{**FLAGS, **paths, "shard_size": "90kB", **flags}))
    folders = {DATASET: folder / "output_path", TOKENIZER: folder / "tokenizer_path"}
    write_archive(folder / "public/data.tar.gz", folders)
    return manifest


@pytest.fixture(scope="module")
def public(tmp_path_factory) -> Path:
    """A folder with a manifest and its shards, of which there are seven."""
    folder = tmp_path_factory.mktemp("prepared")
    manifest = prepare(folder)
    assert len(manifest.shards) == 7
    return folder / "public"


@pytest.fixture
def host(public, tmp_path, monkeypatch) -> Iterator[Host]:
    monkeypatch.setattr(download, "PAUSES", ())
    monkeypatch.setattr(shards, "FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(shards, "LAST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(shards, "LOOK_PERIOD", 0.02)
    monkeypatch.setattr(sampler, "PATIENCE", SECONDS)
    begun = []
    monkeypatch.setattr(ShardCache, "start", lambda self: (begun.append(self), PeriodicThread.start(self)))
    with Host(shutil.copytree(public, tmp_path / "public")) as server:
        yield server
    for cache in begun:
        cache.stop()
        cache.join()


@pytest.fixture
def impatient(host, monkeypatch) -> None:
    monkeypatch.setattr(sampler, "PATIENCE", 0.2)


@pytest.fixture
def args(host, public, tmp_path) -> DatasetArguments:
    """Flags of a trainer with room for five shards."""
    digest = file_sha256(public / "data.tar.gz")
    paths = {"dataset_path": str(tmp_path / "data"), "tokenizer_path": str(tmp_path / "tokenizer")}
    largest = max(Manifest.load(public.parent / "output_path").shards, key=lambda shard: shard.unpacked)
    room = 5 * largest.unpacked + largest.bytes
    return DatasetArguments(dataset_url=host.url, dataset_sha256=digest, data_cache=f"{room / 1000:.3f}kB", **paths)


def open_samples(args: DatasetArguments) -> ShardedSamples:
    fetch_data(args, NOTHING)
    return ShardedSamples(args, NOTHING, Manifest.load(args.dataset_path))


def files(args: DatasetArguments) -> list[Path]:
    return list(Path(args.dataset_path, "train").glob("data-*.arrow"))


# --- preparation -----------------------------------------------------------------------------------------------------


@pytest.mark.programs
def test_shards_have_the_samples_of_the_archive(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    paragraph = "The quick brown fox number {} jumps over the lazy dog. It was not amused, and said so: woof!"
    for split, size in (("train", 60), ("validation", 5)):
        documents = ("\n".join(paragraph.format(100 * i + j) for j in range(20)) for i in range(size))
        (texts / f"{split}.txt").write_text("\n\n".join(documents), encoding="utf-8")
    flags = {"sample": False, "dataset_name": str(texts), "vocab_size": 60, "row_is": "line"}
    whole = prepare(tmp_path / "whole", **flags, shard_size=None)
    manifest = prepare(tmp_path / "parts", **flags)
    assert manifest.splits == whole.splits and manifest.tokenizer_sha256 == whole.tokenizer_sha256
    assert len(manifest.shards) > 1
    paths = {"dataset_path": str(tmp_path / "data"), "tokenizer_path": str(tmp_path / "tokenizer")}
    with Host(tmp_path / "parts/public") as server:
        samples = open_samples(DatasetArguments(dataset_url=server.url, **paths))
        found = [str(samples[number]["input_ids"]) for number in PeerSampler(samples, "peer", 0)]
    expected = [str(sample["input_ids"]) for sample in load_split(tmp_path / "whole/output_path", "train")]
    assert sorted(found) == sorted(expected) and found != expected


@pytest.mark.programs
def test_interrupted_preparation_continues(tmp_path, public, monkeypatch, capsys):
    packed, pack = [], saving.write_archive

    def interrupt(path: Path, folders: dict[str, Path]) -> str:
        packed.append(path.name)
        if len(packed) == 3:
            raise KeyboardInterrupt
        return pack(path, folders)

    monkeypatch.setattr(saving, "write_archive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path)
    assert not (tmp_path / "public/data.tar.gz").exists()
    monkeypatch.setattr(tokenize_wikitext103, "read_corpus", lambda *_: pytest.fail("the text is read again"))
    prepare(tmp_path)
    assert "Continuing the preparation" in capsys.readouterr().out
    assert packed.count("data-00000.tar.gz") == packed.count("data-00001.tar.gz") == 1
    assert {x.name: x.read_bytes() for x in public.iterdir()} == {
        x.name: x.read_bytes() for x in (tmp_path / "public").iterdir()
    }
    assert list((tmp_path / "cache_dir").iterdir()) == []


def test_a_text_that_was_replaced_is_another_preparation(tmp_path, capsys):
    """It was prepared from the copy of the old text, with "Done". What is left of the old one is named."""
    text = tmp_path / "big.txt"
    text.write_text("one\n", encoding="utf-8")
    args = tokenize_wikitext103.TokenizationArguments(
        train_file=str(tmp_path / "*.txt"), train_tokenizer=True, shard_size="1MB", archive=str(tmp_path / "x.tar.gz"),
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    works = []
    for content in ("one\n", "two\n", "three\n"):
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt), tokenize_wikitext103.open_work(args) as work:
                works.append(work)
                named = [line.split("'")[1] for line in capsys.readouterr().out.splitlines()]
                assert named == sorted({str(other) for other in works} - {str(work)})
                raise KeyboardInterrupt
        text.write_text(content + content, encoding="utf-8")
    assert works[0] == works[1] != works[2] == works[3] != works[4] == works[5] and len(set(works)) == 3


def test_preparation_with_other_flags_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_wikitext103, "read_corpus", lambda *_: pytest.fail("the text is read"))
    args = partial(TokenizationArguments, cache_dir=str(tmp_path), archive="x.tar.gz", shard_size="1MB", sample=True)
    folders = []
    for flags in ({}, {"num_proc": 1}, {"seed": 1}):
        with contextlib.suppress(RuntimeError), tokenize_wikitext103.open_work(args(**flags)) as work:
            folders.append(work)
            raise RuntimeError
    assert folders[0] == folders[1] != folders[2] and all(folder.is_dir() for folder in folders)


def test_dataset_of_the_hub_is_streamed(tmp_path, monkeypatch):
    rows, load, options = [f"text {number}" for number in range(2500)], datasets.load_dataset, {}
    datasets.Dataset.from_dict({"text": rows, "number": range(2500)}).to_parquet(tmp_path / "train.parquet")

    def load_dataset(*_names: object, **named: object):
        options.update(named)
        files = {"train": str(tmp_path / "train.parquet")}
        return load("parquet", data_files=files, streaming=named["streaming"], cache_dir=named["cache_dir"])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_dataset("me/texts", None, "text", None, cache_dir=str(tmp_path / "cache"), streaming=True)
    assert options["streaming"] and not source.has_lines
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    read_corpus(source, tmp_path, part_chars=9000)
    corpus = open_corpus(source, tmp_path, 0.2, seed=0)
    documents = {split: [text for part in parts for text in part.read()] for split, parts in corpus.items()}
    assert len(corpus["train"]) == 3 and sorted(documents["train"] + documents["validation"]) == sorted(rows)
    assert 0 < len(documents["validation"]) < 100, "a tenth of a part"


@pytest.mark.parametrize("kind", ["parts", "one file"])
def test_base_that_lacks_weights_is_not_packed(tmp_path, kind):
    """Trainers would refuse it, after the upload of all the rest."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for name in names:  # the least that opens
        (tmp_path / name).write_bytes(b"\2" + bytes(7) + b"{}")
    flags = {"sample": True, "base": str(tmp_path), "archive": "data.tar.gz"}
    TokenizationArguments(**flags)
    (lacking := tmp_path / (names[1] if kind == "parts" else "model.safetensors.index.json")).unlink()
    name = lacking.name if kind == "parts" else "model.safetensors"
    with pytest.raises(UserError, match=f"--base: there is no model .*: it lacks {name}$"):
        TokenizationArguments(**flags)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(UserError, match="has adapters: merge them with ./export_model.py"):
        TokenizationArguments(**flags)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"name": "../data-00000.tar.gz"}, "invalid name"),
        ({"name": "//example.org/data-00000.tar.gz"}, "invalid name"),
        ({"name": "data-00000.tar.gz\n"}, "invalid name"),
        ({"sha256": "0"}, "invalid name"),
        ({"bytes": -1}, "invalid name"),
        ({"unpacked": 1e9}, "invalid name"),
        ({"unpacked": 10**12}, "invalid name"),
        ({"samples": 0}, "invalid name"),
        ({"samples": True}, "invalid name"),
        ({"samples": 2**40}, "invalid name"),
        ({"more": 1}, "more"),
        ({"name": "other-00001.tar.gz"}, "two with the same number"),
        ({"name": 1}, "unexpected: 'int'"),
        (10_001, "too many shards"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (f'{{"format_version": {FORMAT_VERSION + 1}}}', f"it has format {FORMAT_VERSION + 1}, this version reads"),
        (f'{{"format_version": {FORMAT_VERSION}}}', "source"),
    ],
)
def test_manifest_that_is_refused(public, tmp_path, change, fault):
    content = json.loads((public.parent / "output_path/manifest.json").read_text(encoding="utf-8"))
    if isinstance(change, dict):
        content["shards"][0].update(change)
    elif isinstance(change, int):
        content["shards"] = [{**content["shards"][0], "name": f"data-{n:05d}.tar.gz"} for n in range(change)]
    text = change if isinstance(change, str) else json.dumps(content)
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=fault) as error:
        Manifest.load(tmp_path)
    assert "./tokenize_wikitext103.py" in str(error.value) and "\n" not in str(error.value)


# --- the order -------------------------------------------------------------------------------------------------------


class FakeSamples:
    """Samples in shards of sizes, which are all here unless they are in `missing`."""

    def __init__(self, *sizes: int, window: int = 3):
        self.shards, self.window = [SimpleNamespace(samples=size) for size in sizes], window
        self.asked: list[list[int]] = []
        self.missing: set[int] = set()
        self.attempts = 10**6  # to wait, after which what is missing arrives
        self.here: set[int] = set()  # until `has` is called

    def __len__(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def open_cache(self) -> "FakeSamples":
        return self

    def start(self) -> None:
        pass

    def ask(self, plan: list[int]) -> None:
        self.asked.append(list(plan))

    def has(self, needed: list[int]) -> bool:
        self.attempts -= 1
        if self.attempts <= 0:
            self.missing.clear()
        self.here = set(range(len(self.shards))) - self.missing
        return self.here.issuperset(needed)

    def describe(self) -> str:
        return "shards"


SIZES = (40, 30, 50, 8, 40, 2)


@pytest.mark.parametrize("sizes", [SIZES, (100,), (1, 1, 1)])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_each_sample_comes_once_in_a_pass(sizes, window):
    data = FakeSamples(*sizes, window=min(window, len(sizes)))
    order = PeerSampler(data, "peer", 0)
    passes = [list(order) for _ in range(3)]
    assert all(sorted(numbers) == list(range(len(data))) for numbers in passes)
    assert len(set(map(tuple, passes))) == 3 or len(data) < 10
    assert list(PeerSampler(data, "peer", 0)) == passes[0]
    assert list(PeerSampler(data, "other", 0)) != passes[0] or len(data) < 10


def test_a_stage_mixes_a_window_and_needs_one_new_shard():
    data = FakeSamples(*[90] * 8)
    numbers = list(PeerSampler(data, "peer", 0))
    shards_of = [number // 90 for number in numbers]
    assert len(set(shards_of[:30])) == 1, "it begins with one shard"
    assert len(set(shards_of[30:90])) == 2 and len(set(shards_of[90:180])) == 3
    assert max(Counter(shards_of[90:180]).values()) == 30
    first, *others = data.asked
    assert sorted(first[:8]) == sorted(first[8:]) == list(range(8)), "this pass and the next one"
    for before, after in itertools.pairwise(others[2:8]):
        assert len(set(after[:3]) - set(before[:3])) <= 1, "one new shard"
        assert set(before[:3]) <= set(after[:6]), "those in use until now stay for workers"


@pytest.mark.parametrize("stops", [(1,), (63, 64, 65), (10, 100, 7, 33)])
def test_no_sample_comes_again_after_a_restart(tmp_path, stops):
    data, seen, options = FakeSamples(400, 300, 500, 70, 400, 20), [], ("peer", 0, 2, tmp_path / "samples.json")
    for number in stops:
        seen += itertools.islice(PeerSampler(data, *options), number)
    order = PeerSampler(data, *options)
    seen += order
    assert order.passes == 0 and max(Counter(seen).values()) == 1
    assert len(data) - len(seen) < len(stops) * sampler.BLOCK_STEPS * 2, "the rest of a block is left out"
    assert sorted(order) == list(range(len(data))) and order.passes == 1
    assert PeerSampler(data, *options).passes == 2


def test_position_of_other_data_is_not_taken(tmp_path):
    path = tmp_path / "samples.json"
    order = PeerSampler(FakeSamples(*SIZES), "peer", 0, 1, path)
    next(iter(order))
    order = PeerSampler(FakeSamples(*SIZES, 9), "peer", 0, 1, path)
    assert (order.passes, order.position) == (1, 0)
    path.write_text("[1, 2", encoding="utf-8")
    assert PeerSampler(FakeSamples(*SIZES), "peer", 0, 1, path).position == 0


def test_samples_are_repeated_while_a_shard_is_missing(monkeypatch, caplog):
    now = 0.0

    def pass_time() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(sampler, "time", SimpleNamespace(monotonic=pass_time, sleep=lambda _seconds: None))
    caplog.set_level(logging.INFO, "cotrain.data.sampler")
    data = FakeSamples(60, 60, 60, window=1)
    order = PeerSampler(data, "peer", 0, 4)
    first, second, _ = data.asked[0][:3]
    numbers = iter(order)
    seen = [next(numbers) for _ in range(60)]
    data.missing, data.attempts = {second}, 100
    repeated = []
    while not repeated or order.position == 60:
        repeated.append(next(numbers))
    assert "No new shard: training again" in caplog.text and "A new shard is here, after" in caplog.text
    assert {number // 60 for number in repeated[:-1]} == {first} and len(repeated) % 4 == 1
    seen += [repeated[-1], *numbers]
    assert sorted(seen) == list(range(180)) and order.num_repeated == len(repeated) - 1 > 100
    assert f"{order.num_repeated} samples again" in order.describe()


def test_signal_ends_the_wait_for_the_first_shard():
    data = FakeSamples(60, 60)
    data.missing = {0, 1}
    with pytest.raises(SystemExit):
        next(iter(PeerSampler(data, "peer", 0, should_stop=lambda: True)))


# --- the cache -------------------------------------------------------------------------------------------------------


def test_a_trainer_needs_the_disk_for_a_few_shards(args, host):
    samples = open_samples(args)
    assert host.requests == ["/data.tar.gz"]
    order, most = PeerSampler(samples, "peer", 0), 0
    assert order.cache.window == 3
    numbers = []
    for number in order:
        assert len(samples[number]["input_ids"]) <= 32
        numbers.append(number)
        if len(numbers) % 50 == 0:
            with contextlib.suppress(FileNotFoundError):
                most = max(most, sum(file.stat().st_size for file in files(args)))
    assert sorted(numbers) == list(range(len(samples)))
    assert most <= parse_size("--data_cache", args.data_cache)
    again = list(order)
    assert sorted(again) == sorted(numbers) != again
    with pytest.raises(UserError, match="in use by another peer; pass a different folder"):
        samples.open_cache()


def test_what_is_here_is_not_downloaded_again(args, host):
    args.data_cache = "2GB"
    list(PeerSampler(open_samples(args), "peer", 0))
    (damaged, *_) = files(args)
    damaged.write_bytes(b"cut")
    args = dataclasses.replace(args, dataset_path=f"{args.dataset_path}2")
    shutil.copytree(damaged.parents[1], args.dataset_path)
    host.requests.clear()
    list(PeerSampler(open_samples(args), "other", 0))
    assert len(host.requests) == 1


def outlast(order: PeerSampler, host: Host) -> Iterator[int]:
    """Take samples until those that are here come again, since the server is away."""
    numbers = iter(order)
    next(numbers)
    wait_until(lambda: order.cache.has(order.cache.wanted), SECONDS, "a full cache")
    host.away = True
    while not order.num_repeated:
        next(numbers)
    return numbers


def test_server_away_and_back(args, host, impatient, caplog):
    samples = open_samples(args)
    order = PeerSampler(samples, "peer", 0, 2)
    numbers = outlast(order, host)
    assert "status 503" in caplog.text and "training continues on the" in caplog.text
    assert "no new ones: --dataset_url" in order.describe()
    position = order.position
    host.away = False
    wait_until(lambda: order.cache.fault is None, SECONDS, "the next shard")
    while order.position == position:
        next(numbers)
    assert "no new ones" not in order.describe()


def end(order: PeerSampler) -> None:
    """Let go of the folder, as a trainer that ends."""
    order.cache.stop()
    order.cache.join()
    order.cache.lock.__exit__(None, None, None)


def test_smaller_cache_after_a_restart(args):
    room, args.data_cache = args.data_cache, "2GB"
    samples = open_samples(args)
    order = PeerSampler(samples, "peer", 0)
    wait_until(lambda: len(order.cache.here) == 7, SECONDS, "all shards")
    end(order)
    args.data_cache = room
    order = PeerSampler(samples, "peer", 0)
    wait_until(lambda: len(files(args)) == len(order.cache.wanted) < 7, SECONDS, "the others are removed")


def test_restart_while_the_server_is_away(args, host, impatient, tmp_path):
    """A trainer with the smallest cache has used all its shards, and the next one of its order is not there."""
    samples, path = open_samples(args), tmp_path / "samples.json"
    largest = max(samples.shards, key=lambda shard: shard.unpacked)
    args.data_cache = f"{(3 * largest.unpacked + largest.bytes) / 1000:.3f}kB"
    order = PeerSampler(samples, "peer", 0, 2, path)
    assert order.cache.window == 1
    outlast(order, host)
    end(order)
    again = PeerSampler(samples, "peer", 0, 2, path)
    numbers = iter(again)
    assert len(samples[next(numbers)]["input_ids"]) <= 32 and again.num_repeated == 1
    host.away = False
    position = again.position
    while again.position == position:
        next(numbers)
    assert again.passes == 0


@pytest.mark.parametrize("place", [0, 2])
def test_one_shard_that_is_damaged_on_the_server(args, host, tmp_path, caplog, place):
    samples = open_samples(args)
    order = PeerSampler(samples, "peer", 0, 2)
    damaged = order.order.shards[place]
    path = tmp_path / "public" / samples.shards[damaged].name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    seen = []
    for number in order:
        seen.append(number)
        assert order.num_repeated < 20_000, "the trainer waits for the shard"
        if "A shard is left out" in caplog.text and content:
            assert damaged not in order.cache.here
            path.write_bytes(content)
            content = b""
            wait_until(lambda: damaged in order.cache.here, SECONDS, "the shard, which was repaired")
    starts, own = order.order.starts, samples.shards[damaged].samples
    of_damaged = {number for number in seen if starts[damaged] <= number < starts[damaged + 1]}
    assert own / 4 < len(of_damaged) < own, "parts of it, after it was repaired"
    assert len(samples) - len(set(seen)) == own - len(of_damaged) + len(samples) % 2, "the others are complete"
    assert order.passes == 0


def damage(host: Host, change: Callable[[bytes], bytes]) -> None:
    for path in host.archive.parent.glob("data-*"):
        path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "host_change", "fault"),
    [
        ({}, lambda host: setattr(host, "away", True), r"data-\d+\.tar\.gz cannot be .* 503"),
        ({}, lambda host: damage(host, lambda content: content[:-1] + b"x"), "has SHA-256 .* instead of"),
        ({}, lambda host: damage(host, lambda content: content + bytes(100_000)), "refused"),
        ({"vocab_size": 100}, None, "its samples are damaged"),
        ({"max_seq_length": 8}, None, "its samples are damaged"),
        ({"unpacked": 1}, None, "its samples are damaged"),
        ({"samples": 1}, None, "its samples are damaged"),
    ],
)
def test_first_shard_that_is_not_that_of_the_manifest_ends_the_trainer(args, host, change, host_change, fault):
    manifest = open_samples(args).manifest
    if {"unpacked", "samples"} & change.keys():
        change = {"shards": [dataclasses.replace(shard, **change) for shard in manifest.shards]}
    if host_change is not None:
        host_change(host)
    with pytest.raises(UserError, match=fault):
        next(iter(PeerSampler(ShardedSamples(args, NOTHING, dataclasses.replace(manifest, **change)), "peer", 0)))
    assert files(args) == []


def test_bounds_of_the_cache(args):
    samples = open_samples(args)
    args.data_cache = "1kB"
    with pytest.raises(UserError, match=r"--data_cache 1kB: the shards of this data need \d+MB or more"):
        samples.open_cache()
    args.data_cache, args.dataset_url = "2GB", None
    with pytest.raises(UserError, match="0 of 7 shards are in .* pass --dataset_url"):
        samples.open_cache()


# --- what each peer takes --------------------------------------------------------------------------------------------


def test_an_evaluator_needs_no_shard(args, host):
    fetch_data(args, NOTHING)
    count = Manifest.load(args.dataset_path).splits["validation"]["instances"]
    assert len(load_split(args.dataset_path, "validation")) == count > 0
    assert not Path(args.dataset_path, "train").exists()
    fetch_data(args, NOTHING)
    assert host.requests == ["/data.tar.gz"]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("hf://datasets/me/texts/a.tar.gz", "https://huggingface.co/datasets/me/texts/resolve/main/a.tar.gz"),
        ("hf://datasets/me/texts@v1/a.tar.gz", "https://huggingface.co/datasets/me/texts/resolve/v1/a.tar.gz"),
        ("s3://my-bucket/a/data.tar.gz", "https://my-bucket.s3.amazonaws.com/a/data.tar.gz"),
        ("https://example.org/s3://a/data.tar.gz", "https://example.org/s3://a/data.tar.gz"),
    ],
)
def test_addresses_of_hosts(url, address):
    assert ModelArguments(dataset_url=url).dataset_url == address


@pytest.mark.parametrize("value", ["", "2", "2gb", "-1GB", "1e9GB", "nanGB", "2 GBx"])
def test_sizes(value):
    with pytest.raises(UserError, match="--data_cache must be a size such as 256MB"):
        DatasetArguments(data_cache=value)
    assert parse_size("", "1.5GB") == 1_500_000_000 and parse_size("", "256MB") == 256_000_000


def test_sizes_and_times_have_no_exponents_and_are_not_zero(tmp_path, capsys):
    """They were "1.2e+02 GB an hour", "0.00 GB" and "for 1e-05 days"."""
    assert [format_size(size) for size in (900, 3e5, 1.25e9, 1.2e13)] == [
        "0.9 kB",
        "300.0 kB",
        "1.2 GB",
        "12,000.0 GB",
    ]
    invite(InvitationArguments("alice", str(tmp_path / "a"), authority=str(tmp_path / "key"), days=1e-4))
    assert "Invited alice for 9 s: " in capsys.readouterr().out
