"""The data-preparation script, its files on disk, and how trainers load them."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AlbertConfig, AutoTokenizer, BertConfig, BertTokenizer, GPT2Config

import tokenize_wikitext103
from arguments import DatasetArguments
from cotrain.common.atomic_files import check_target, new_file, new_folder, temporary_folder
from cotrain.common.errors import UserError
from cotrain.data.archive import DATASET, TOKENIZER, file_sha256, write_archive
from cotrain.data.loading import load_split
from cotrain.data.manifest import Manifest
from cotrain.data.schemas import SCHEMAS
from cotrain.models.objectives import OBJECTIVES, SPLITS
from cotrain.models.vocabulary import tokenizer_sha256
from cotrain.preparation import saving
from cotrain.preparation.corpus import split_documents
from cotrain.preparation.sources import open_sample
from cotrain.preparation.tokenizer_training import train_tokenizer
from cotrain.training.workload import load_workload
from tests.support.fakes import make_arguments, make_text_task
from tests.support.peers import TINY_ALBERT
from tests.support.processes import ROOT
from tokenize_wikitext103 import TokenizationArguments

SCRIPT = ROOT / "tokenize_wikitext103.py"
CONFIG_OF = {"mlm_sop": AlbertConfig(), "mlm": BertConfig(), "clm": GPT2Config()}


def arguments(folder: Path, **flags) -> TokenizationArguments:
    """Return the flags of a small run in a folder."""
    defaults = {
        "sample": not {"train_file", "dataset_name"} & set(flags),
        "train_tokenizer": "tokenizer" not in flags,
        "vocab_size": 1000,
        "max_seq_length": 64,
        "num_proc": 1,
        "output_path": str(folder / "dataset"),
        "tokenizer_path": str(folder / "tokenizer"),
        "cache_dir": str(folder / "cache"),
    }
    return TokenizationArguments(**(defaults | flags))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Return a folder with a dataset for ALBERT, made of the sample text, and its tokenizer."""
    folder = tmp_path_factory.mktemp("prepared")
    tokenize_wikitext103.prepare(arguments(folder))
    return folder


@pytest.fixture(scope="module")
def small_text(tmp_path_factory) -> str:
    """Return a text file with 20 documents."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    paragraph = "The quick brown fox jumps over the lazy dog. It was not amused, and said so: woof! Number {}."
    path.write_text(
        "\n\n".join("\n".join(paragraph.format(10 * i + j) for j in range(10)) for i in range(20)), encoding="utf-8"
    )
    return str(path)


# --- the dataset -----------------------------------------------------------------------------------------------------


@pytest.mark.programs
@pytest.mark.parametrize(
    ("objective", "tokenizer_class", "special_ids"),
    [
        ("mlm_sop", "AlbertTokenizer", {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}),
        ("mlm", "RobertaTokenizer", {"bos": 0, "cls": 0, "pad": 1, "eos": 2, "sep": 2, "unk": 3, "mask": 4}),
        ("clm", "GPT2Tokenizer", {"bos": 0, "eos": 0, "pad": 1}),
    ],
)
def test_each_model_family(tmp_path, objective, tokenizer_class, special_ids):
    manifest = tokenize_wikitext103.prepare(arguments(tmp_path, objective=objective))

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert type(tokenizer).__name__ == tokenizer_class == manifest.tokenizer_class
    assert {name: getattr(tokenizer, f"{name}_token_id") for name in special_ids} == special_ids
    assert len(tokenizer) == manifest.vocab_size == 1000
    text = "the value of an expression or of a name"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]).split() == text.split()

    assert Manifest.load(tmp_path / "dataset") == manifest
    assert tokenizer_sha256(tokenizer) == manifest.tokenizer_sha256
    splits = {split: load_split(tmp_path / "dataset", split) for split in SPLITS}
    for split in SPLITS:
        assert splits[split].features.arrow_schema.remove_metadata() == SCHEMAS[objective]
        assert len(splits[split]) == manifest.splits[split]["instances"]
        assert max(map(len, splits[split]["input_ids"])) == 64
    batch = make_text_task(CONFIG_OF[objective], tokenizer).collate([splits["train"][i] for i in range(4)])
    assert {tuple(value.shape) for value in batch.values()} <= {(4, 64), (4,)}
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert os.listdir(tmp_path / "cache") == []  # temporary files are removed


@pytest.mark.programs
def test_the_number_of_processes_does_not_matter(tmp_path, monkeypatch):
    # Several groups of documents even in this small text, so that the work is divided.
    monkeypatch.setattr(saving, "GROUP_CHARS", 40_000)
    for num_proc in (1, 2):
        tokenize_wikitext103.prepare(arguments(tmp_path / str(num_proc), num_proc=num_proc))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")  # byte for byte, including tokenizer and manifest


CHAT = {"objective": "chat", "sample": False, "train_file": __file__}
NEEDS = "--objective chat needs"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"shard_size": "1MB"}, "--shard_size needs --archive"),
        ({"shard_size": "1MB", "archive": "my data.tar.gz"}, "--shard_size needs --archive"),
        ({"shard_size": "1MB", "archive": "data"}, "pass a name that ends in .tar.gz"),
        ({"shard_size": "1", "archive": "data.tar.gz"}, "--shard_size must be a size such as 256MB"),
        ({"base": "configs"}, "--base also needs --archive"),
        ({"base": "configs", "archive": "data.tar.gz"}, "--base: there is no model with config.json and"),
        (CHAT, NEEDS),
        ({**CHAT, "tokenizer": "x", "train_tokenizer": True}, NEEDS),
        ({"objective": "chat", "tokenizer": "x"}, NEEDS),
        ({"language": "bengali"}, r"--language 'bengali' is not known: .*bn \("),
        ({"language": "xx"}, r"--language 'xx' is not known: .*en \("),
        ({"language": ""}, r"--language '' is not known: .*en \("),
        ({"language": "German"}, r"--language 'German' is not known: .*de \("),
    ],
)
def test_wrong_flags(flags, message):
    with pytest.raises(UserError, match=message):
        TokenizationArguments(**{"sample": True, **flags})


# --- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_same_text_gives_the_same_tokenizer(objective):
    documents = list(split_documents(open_sample().parts["train"][0]()))[:30]
    sha256 = {tokenizer_sha256(train_tokenizer(iter(documents), objective, 1000, 64)) for _ in range(3)}
    assert len(sha256) == 1


def test_a_book_in_one_line_trains_a_tokenizer():
    """sentencepiece leaves out a line above a million bytes, and takes hours for a little less."""
    words = (f"{chr(97 + number % 26) * 18}{number % 10}" for number in range(60_000))
    assert len(train_tokenizer([" ".join(words)], "mlm_sop", 60, 64)) == 60


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_signal_in_the_middle_of_training_a_tokenizer_is_no_error_of_the_text(objective):
    def documents() -> Iterator[str]:
        yield "a b c d e f " * 20
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(documents(), objective, 300, 64)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("size", [100_000, 8])
def test_impossible_vocabulary_size_names_a_possible_one(objective, size):
    documents = list(split_documents(open_sample().parts["train"][0]()))[:10]
    with pytest.raises(UserError, match=f"--vocab_size {size}") as error:
        train_tokenizer(documents, objective, size, 64)
    possible = int(re.search(r"(?:pass|<=|vs) (\d+)", str(error.value))[1])
    assert len(train_tokenizer(documents, objective, possible, 64)) == possible


def test_existing_tokenizer_is_reused(tmp_path, prepared):
    before = contents(prepared / "tokenizer")
    manifest = tokenize_wikitext103.prepare(
        arguments(tmp_path, tokenizer=str(prepared / "tokenizer"), tokenizer_path=str(prepared / "tokenizer"))
    )
    assert manifest.tokenizer == "tokenizer"  # the path of the folder is not published
    assert contents(prepared / "tokenizer") == before
    with pytest.raises(UserError, match=r"--objective clm needs .* eos"):
        BertTokenizer().save_pretrained(tmp_path / "bert")
        flags = {"objective": "clm", "tokenizer": str(tmp_path / "bert")}
        tokenize_wikitext103.prepare(arguments(tmp_path / "clm", **flags))
    assert not (tmp_path / "clm" / "tokenizer").exists()


# --- loading in trainers ---------------------------------------------------------------------------------------------


def test_training_data_follows_the_flags(prepared):
    """tests/scripts/test_bad_input.py has the other settings that do not match the data."""
    paths = {"dataset_path": str(prepared / "dataset"), "tokenizer_path": str(prepared / "tokenizer")}
    flags = {"model_name_or_path": json.dumps(TINY_ALBERT), "seq_length": 64, "mlm_probability": 0.5}
    args = make_arguments(prepared, {"use_cpu": True}, DatasetArguments(**flags, **paths))
    work = load_workload(args)
    assert len(work.samples) == Manifest.load(prepared / "dataset").splits["train"]["instances"]
    assert (work.task.collate([work.samples[0]])["labels"] != -100).float().mean() > 0.3
    args.training.per_device_train_batch_size = 10**6
    with pytest.raises(UserError, match="fewer than --per_device_train_batch_size 1000000"):
        load_workload(args)


def test_datasets_opens_the_folder_and_its_cache_files_do_no_harm(prepared, tmp_path):
    shutil.copytree(prepared / "dataset", tmp_path / "dataset")
    dataset = datasets.load_from_disk(str(tmp_path / "dataset"))
    loaded = {split: load_split(tmp_path / "dataset", split) for split in SPLITS}
    for split in SPLITS:
        assert dataset[split].features.arrow_schema.remove_metadata() == SCHEMAS["mlm_sop"]
        assert dataset[split][:] == loaded[split][:]
    dataset["train"].shuffle(seed=1)
    (file,) = (tmp_path / "dataset" / "train").glob("data*.arrow")
    datasets.Dataset.from_file(str(file)).map(lambda sample: {"new": 1})
    assert len(list((tmp_path / "dataset").rglob("*.arrow"))) > 2
    assert load_split(tmp_path / "dataset", "train")[:] == loaded["train"][:]


def test_the_folder_is_named_after_what_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wikitext, neutral = "data/albert_tokenized_wikitext", "data/tokenized"
    assert TokenizationArguments().output_path == wikitext
    for flags in ({"objective": "clm"}, {"sample": True}, {"dataset_name": "bookcorpus"}, {"train_file": __file__}):
        assert TokenizationArguments(**flags).output_path == neutral
    assert TokenizationArguments(output_path="x").output_path == "x"
    # Trainers find the data that was prepared last, also that of older versions.
    assert DatasetArguments().dataset_path == neutral
    for number, folder in enumerate([wikitext, neutral, wikitext]):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "manifest.json").touch()
        os.utime(Path(folder, "manifest.json"), (number + 1, number + 1))
        assert DatasetArguments().dataset_path == folder


def test_the_digest_of_a_tokenizer_has_its_ids():
    first, second = (Tokenizer(models.WordLevel({"a": number, "b": 1 - number})) for number in (0, 1))
    assert tokenizer_sha256(first) != tokenizer_sha256(second)


def test_a_damaged_dataset_is_explained(prepared, tmp_path):
    (file,) = Path(shutil.copytree(prepared / "dataset", tmp_path / "cut"), "train").glob("*.arrow")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match="is damaged"):
        load_split(tmp_path / "cut", "train")


def test_collator_masks_text_only(prepared):
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    train = load_split(prepared / "dataset", "train")
    samples = sorted(train, key=lambda sample: len(sample["input_ids"]))  # short ones first, for padding
    torch.manual_seed(0)
    batch = make_text_task(CONFIG_OF["mlm_sop"], tokenizer).collate(samples)
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels", "sentence_order_label"}
    assert batch["sentence_order_label"].tolist() == [sample["sentence_order_label"] for sample in samples]

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([sample[name] + [value] * (64 - len(sample[name])) for sample in samples])

    original, is_special = padded("input_ids", tokenizer.pad_token_id), padded("special_tokens_mask", 1).bool()
    chosen = batch["labels"] != -100
    assert not (chosen & is_special).any()
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    assert chosen.sum().item() / (~is_special).sum().item() == pytest.approx(0.15, abs=0.01)


def test_causal_collator_teaches_the_end_of_text():
    tokenizer = train_tokenizer(["a b c d e f " * 20], "clm", 260, 64)
    tokenizer.pad_token = None  # as for GPT-2's published tokenizer
    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in ([5, 6, 0, 7], [8, 0])]
    batch = make_text_task(CONFIG_OF["clm"], tokenizer).collate(samples)
    assert batch["labels"].tolist() == [[5, 6, 0, 7, *[-100] * 4], [8, 0, *[-100] * 6]]
    assert batch["attention_mask"].sum().item() == 6


# --- atomic replacement ----------------------------------------------------------------------------------------------


def test_a_dataset_is_replaced_only_on_demand_and_only_when_complete(tmp_path, prepared, monkeypatch, small_text):
    flags = {"train_file": small_text, "vocab_size": 60}
    tokenize_wikitext103.prepare(arguments(tmp_path, **flags))
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"already exists; pass --overwrite"):
        tokenize_wikitext103.prepare(arguments(tmp_path, **flags))

    def fill_the_disk(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "save", fill_the_disk)
        with pytest.raises(OSError, match="No space left"):
            tokenize_wikitext103.prepare(arguments(tmp_path, overwrite=True, seed=1, **flags))
    assert contents(tmp_path) == before

    tokenize_wikitext103.prepare(arguments(tmp_path, overwrite=True, seed=1, **flags))
    assert Manifest.load(tmp_path / "dataset").seed == 1
    assert sorted(os.listdir(tmp_path)) == ["cache", "dataset", "tokenizer"]


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch):
    """It cannot be renamed: a Docker volume was filled for an hour in vain."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    (tmp_path / "volume").mkdir()
    with pytest.raises(UserError, match="is a mount point, which cannot be replaced; pass a folder in it"):
        check_target(tmp_path / "volume", "--output_path", replaceable=("manifest.json",))


def test_what_a_killed_run_leaves_is_removed_or_undone(tmp_path):
    target = tmp_path / "target"
    new, old = (tmp_path / f".target.{'0' * 12}.{suffix}" for suffix in ("new", "old"))
    new.mkdir()  # no process holds a lock on it
    old.mkdir()
    (old / "whole").touch()
    with temporary_folder(target) as in_use, temporary_folder(target):
        assert in_use.is_dir() and not new.exists()
        assert (target / "whole").is_file()


def test_a_replacement_that_fails_half_way_leaves_the_one_before(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mark").write_text("before", encoding="utf-8")
    rename = Path.rename

    def fail_for_new(path, target):
        if path.suffix == ".new":
            raise OSError(errno.EIO, "broken disk")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with (
        pytest.raises(OSError, match="broken disk"),
        new_folder(tmp_path / "target", "--flag", overwrite=True, replaceable=("mark",)) as folder,
    ):
        (folder / "mark").write_text("after", encoding="utf-8")
    assert contents(tmp_path) == {"target/mark": b"before"}


def test_a_failed_file_leaves_the_one_before(tmp_path):
    (tmp_path / "file").write_text("before", encoding="utf-8")
    with pytest.raises(ZeroDivisionError), new_file(tmp_path / "file") as path:
        path.write_text("half", encoding="utf-8")
        1 / 0  # noqa: B018
    assert contents(tmp_path) == {"file": b"before"}


def test_archive_is_the_same_each_time(prepared, tmp_path):
    folders = {"data/albert": prepared / "dataset", "data/tokenizer": prepared / "tokenizer"}
    digests = []
    for number in (1, 2):
        for file in prepared.rglob("*"):
            os.utime(file, (number, number))
        digests.append(write_archive(tmp_path / "a.tar.gz", folders))
    assert digests[0] == digests[1] == file_sha256(tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert archive.getnames() == sorted(archive.getnames())
        assert {(entry.mtime, entry.uid, entry.uname) for entry in archive} == {(0, 0, "")}


# --- as a user runs it -----------------------------------------------------------------------------------------------


def test_the_whole_script(tmp_path, small_text):
    flags = ["--train_tokenizer", "--vocab_size", "60", "--max_seq_length", "64", "--archive", "data.tar.gz"]
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--train_file", small_text, "--row_is", "line", *flags]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert "train: 19 documents, " in result.stdout and "validation: 1 documents, " in result.stdout
    assert result.stdout.count(", 0 dropped tokens; mean fill ") == 2
    assert f"SHA-256 {file_sha256(tmp_path / 'data.tar.gz')}" in result.stdout
    with tarfile.open(tmp_path / "data.tar.gz") as archive:
        assert {"/".join(name.split("/")[:2]) for name in archive.getnames()} == {DATASET, TOKENIZER}


HINT = "pass --train_file or --sample"
HUB = {"sample": False, "train_tokenizer": False}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "is a single document"),
        ({"output_path": "text.txt/dataset"}, r"--output_path: .*text.txt' \(Not a directory\); choose another"),
        ({"output_path": "thesis", "overwrite": True}, "--output_path: .* contains other files"),
        ({"output_path": "clone", "overwrite": True}, r"contains other files \(\.git, thesis\.txt\)"),
        ({"dataset_name": "bookcorpus"}, r"found bookcorpus\.py; pass --dataset_revision refs/convert/parquet"),
        (HUB, f"'Salesforce/wikitext wikitext-103-v1' .*reach None; .* {HINT}"),
        ({**HUB, "dataset_name": "bookcorpus/bookcorpus"}, f"reach refs/convert/parquet; .* {HINT}"),
        ({**HUB, "dataset_name": "no/such", "dataset_revision": "v1"}, f"'no/such' .*reach v1; .* {HINT}"),
        ({"tokenizer": "no-such"}, "--tokenizer: 'no-such' is neither a folder here nor on the Hub .*go online"),
        ({"tokenizer": "./missing"}, r"--tokenizer: there is no folder '\./missing'"),
        ({"tokenizer": "thesis"}, "holds no tokenizer that can be read .*--train_tokenizer"),
    ],
)
def test_what_fails_is_explained_and_leaves_nothing(tmp_path, monkeypatch, flags, message):
    def load_dataset(*args, **kwargs):
        raise ConnectionError(f"Couldn't reach {kwargs['revision']}\nfor these reasons")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    text = "One.\n\nTwo." if "tokenizer" in flags else "just one line"
    files = {"text.txt": text.encode(), "thesis/thesis.txt": b"years of work", "bookcorpus/bookcorpus.py": b""}
    files |= {"clone/manifest.json": b"of a browser", "clone/thesis.txt": b"years of work", "clone/.git": b"all of it"}
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    source = {} if "dataset_name" in flags or "sample" in flags else {"train_file": "text.txt"}
    with pytest.raises(UserError, match=message):
        tokenize_wikitext103.prepare(arguments(tmp_path, **source, **flags))
    assert contents(tmp_path) == files
