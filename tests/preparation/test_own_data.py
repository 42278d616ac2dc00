"""A trainer's own text: how it is prepared, mixed with the run's, and refused."""

import json
import os
from pathlib import Path

import pytest
from datasets import Dataset

import tokenize_wikitext103
from arguments import DatasetArguments
from cotrain.common.atomic_files import lock_folder
from cotrain.common.errors import UserError
from cotrain.common.flags import ArgumentsError
from cotrain.data.loading import check_dataset, load_split
from cotrain.data.manifest import Manifest
from cotrain.data.own_samples import OwnSamples
from cotrain.data.sampler import PeerSampler
from cotrain.preparation.own_data import prepare_own_data
from cotrain.training.workload import load_workload
from tests.support.conversations import chat, make_chat_tokenizer
from tests.support.fakes import make_arguments
from tokenize_wikitext103 import TokenizationArguments

MODEL = json.dumps({"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                    "num_attention_heads": 1, "max_position_embeddings": 64})  # fmt: skip


def write(path: Path, number: int, topic: str = "sailing") -> Path:
    rows = (chat(f"What is {topic} {n}?", f"It is {topic} {n}.") for n in range(number))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prepare(folder: Path, **flags) -> Manifest:
    make_chat_tokenizer("chatml").save_pretrained(folder / "base")
    options = {"objective": "chat", "tokenizer": str(folder / "base"), "max_seq_length": 64, "num_proc": 1,
               "output_path": str(folder / "dataset"), "tokenizer_path": str(folder / "tokenizer"),
               "cache_dir": str(folder / "cache")}  # fmt: skip
    return tokenize_wikitext103.prepare(TokenizationArguments(**options, **flags))


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder with a run's data, which has no samples."""
    prepare(tmp_path, without_samples=True)
    return tmp_path


def load(run: Path, **flags):
    """Load what a trainer of a run computes on."""
    data = {"dataset_path": str(run / "dataset"), "tokenizer_path": str(run / "tokenizer"), "takes_own_data": True,
            "model_name_or_path": MODEL, **flags}  # fmt: skip
    return load_workload(
        make_arguments(run / "outputs", {"use_cpu": True}, DatasetArguments(**data), run_id="friends")
    )


def test_data_without_samples_has_no_text(run):
    manifest = Manifest.load(run / "dataset")
    assert (manifest.splits, manifest.objective, manifest.max_seq_length) == ({}, "chat", 64)
    check_dataset(run / "dataset")
    assert [path.name for path in (run / "dataset").iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("flags", [{"train_file": "x.jsonl"}, {"sample": True}, {"train_tokenizer": True}])
def test_data_without_samples_has_no_source(flags):
    with pytest.raises(ArgumentsError, match="--without_samples reads no text"):
        TokenizationArguments(without_samples=True, **flags)


def test_own_data_is_prepared_once(run, caplog):
    caplog.set_level("INFO")
    path, target = write(run / "chats.jsonl", 20), run / "outputs/own_data"
    arguments = str(path), Manifest.load(run / "dataset"), run / "tokenizer", target
    prepare_own_data(*arguments)
    first = (target / "manifest.json").stat().st_mtime_ns
    samples = load_split(target, "train")
    tokenizer = make_chat_tokenizer("chatml")
    assert any("sailing 7" in text for text in map(tokenizer.decode, samples["input_ids"]))
    prepare_own_data(*arguments)
    assert (target / "manifest.json").stat().st_mtime_ns == first and "changed" not in caplog.text
    write(path, 12)
    prepare_own_data(*arguments)
    assert "chats.jsonl', or what the run makes of it, has changed: preparing it again" in caplog.text
    assert len(load_split(target, "train")) < len(samples)


def test_a_folder_and_a_wildcard_are_read(run):
    (run / "mails").mkdir()
    for name in "ab":
        write(run / f"mails/{name}.jsonl", 10, topic=f"topic{name}")
    counts = []
    for path in (run / "mails", run / "mails/*.jsonl"):
        work = load(run, own_data=str(path))
        counts.append(len(work.samples.own))
    assert counts[0] == counts[1] > 10


def test_a_pipe_is_read_at_each_start(tmp_path):
    make_chat_tokenizer("chatml").save_pretrained(tmp_path)
    settings = {"objective": "clm", "max_seq_length": 64, "seed": 0, "language": "en", "source": "none",
                "tokenizer": "base", "tokenizer_class": "", "vocab_size": 1000, "tokenizer_sha256": "",
                "splits": {}, "shards": []}  # fmt: skip
    counts = []
    for lines in (40, 80):
        text = "".join(f"About sailing {n}.\n\n" for n in range(lines))
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        prepare_own_data(f"/dev/fd/{reading}", Manifest(**settings), tmp_path, tmp_path / "own_data")
        os.close(reading)
        counts.append(Manifest.load(tmp_path / "own_data").splits["train"]["tokens"])
    assert counts[1] > counts[0] > 0


def test_own_samples_are_mixed_with_the_runs(run):
    """In a pass each of the longer part comes once, and the share is as told."""
    own, common = ([{"n": n, "is_own": is_own} for n in range(size)] for size, is_own in ((10, True), (60, False)))
    mixed = OwnSamples(Dataset.from_list(own), Dataset.from_list(common), 0.25)
    taken = [mixed[n] for n in range(len(mixed))]
    assert [row["n"] for row in taken if not row["is_own"]] == list(range(60))
    assert [row["n"] for row in taken if row["is_own"]] == [*range(10), *range(10)]
    sampler = PeerSampler(mixed, "peer", 0)
    assert sorted(sampler) == list(range(80))
    assert sampler.describe() == (
        "100% of pass 1; 10 of this trainer's own samples, 25% of what it takes, each 2.0 times so far"
    )


def test_default_share(tmp_path, run):
    """Half if the run has samples, and validation is the trainer's own."""
    path = write(run / "chats.jsonl", 40)
    alone = load(run, own_data=str(path))
    assert alone.samples.share == 1.0 and len(alone.samples) == len(alone.samples.own)
    (other := tmp_path / "other").mkdir()
    prepare(other, train_file=str(write(other / "run.jsonl", 200, topic="baking")))
    mixed = load(other, own_data=str(path))
    assert mixed.samples.share == 0.5 and len(mixed.samples.common) > len(mixed.samples.own)
    held_out = mixed.task.load_samples("validation")
    assert "sailing" in mixed.task.tokenizer.decode(held_out[0]["input_ids"])
    assert load(other, own_data=str(path), own_share=1.0).samples.common is None
    assert not isinstance(load(other).samples, OwnSamples)


def test_repeats_are_read_once(run):
    """A chat that is in two files is not held out from itself, and neither is a text."""
    (run / "mails").mkdir()
    for name in "ab":
        write(run / f"mails/{name}.jsonl", 10)
    work = load(run, own_data=str(run / "mails"))
    rows = [*work.samples.own, *work.task.load_samples("validation")]
    texts = [work.task.tokenizer.decode(row["input_ids"]) for row in rows]
    assert "".join(texts).count("What is sailing 7?") == 1


def test_conversations_that_are_all_too_long(run):
    """Of the only chat that is held out nothing is measured; without any for training the message says why."""
    short = [chat(f"What is {n}?", f"It is {n}.") for n in range(9)]
    for number in range(10):  # one of them is held out
        rows = [*short[:number], chat("Why?", "Since " * 100), *short[number:]]
        (run / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        work = load(run, own_data=str(run / "chats.jsonl"))
        held_out = len(work.task.load_samples("validation"))
        if not held_out:
            break
    assert not held_out and len(work.samples) >= 4
    rows = [chat(f"Why {n}?", "Since " * 100) for n in range(5)]
    (run / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(UserError, match=r"^--own_data: long.jsonl: no conversation fits into the run's 64 tokens"):
        load(run, own_data=str(run / "long.jsonl"))


def test_own_data_of_a_running_trainer_stays(run):
    """A second trainer in its folder replaced it, before it was refused."""
    load(run, own_data=str(write(run / "chats.jsonl", 20)))
    before = (run / "outputs/own_data/manifest.json").read_bytes()
    with lock_folder(run / "outputs", "--output_dir"), pytest.raises(UserError, match="is in use by another peer"):
        load(run, own_data=str(write(run / "others.jsonl", 30)))
    assert (run / "outputs/own_data/manifest.json").read_bytes() == before


def test_errors_are_one_line(run):
    few, text = write(run / "few.jsonl", 2), run / "damaged.jsonl"
    text.write_bytes(b"\x00\x01\x02\xff\xfe" * 100)
    secret = write(run / "closed.jsonl", 20)
    for flags, message in (
        (
            {"own_data": str(few)},
            r"--own_data: '.*few.jsonl' has 1 samples, fewer than --per_device_train_batch_size 4",
        ),
        ({"own_data": str(text)}, r"--own_data: 'damaged.jsonl' .*; see docs/data.md#conversations$"),
        (
            {"own_data": str(secret), "takes_own_data": False},
            "--own_data: run friends takes no data of trainers; drop it",
        ),
        ({}, r"this run has no samples to share for 'train': trainers pass --own_data FILE"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load(run, **flags)
        assert "\n" not in str(caught.value)
    (run / "talk.txt").write_text("Alice: hi\nBob: ho\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"^--own_data: talk.txt: the split 'train' has no conversation; see"):
        load(run, own_data=str(run / "talk.txt"))
    with pytest.raises(ArgumentsError, match="--own_data: there is no file 'none.jsonl'; pass text"):
        DatasetArguments(own_data="none.jsonl")
    (run / "years/2020").mkdir(parents=True)
    with pytest.raises(ArgumentsError, match=r"--own_data: there is no file '.*/years/\*'; pass text"):
        DatasetArguments(own_data=str(run / "years/*"))
    with pytest.raises(ArgumentsError, match="--own_share also needs --own_data"):
        DatasetArguments(own_share=0.5)
