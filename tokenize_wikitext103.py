#!/usr/bin/env python3
"""Turn text into a tokenized dataset and a tokenizer that every trainer can load. Run it once, on any machine:

./tokenize_wikitext103.py                                                  # WikiText-103, ALBERT's tokenizer
./tokenize_wikitext103.py --sample --train_tokenizer --vocab_size 2000     # nothing to download
./tokenize_wikitext103.py --train_file my.txt --train_tokenizer --archive data.tar.gz
./tokenize_wikitext103.py --dataset_name my/texts --train_tokenizer --archive public/data.tar.gz --shard_size 256MB
./tokenize_wikitext103.py --objective clm --tokenizer gpt2                 # for GPT-2
./tokenize_wikitext103.py --objective chat --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct --train_file chats.jsonl
./tokenize_wikitext103.py --objective chat --tokenizer … --without_samples --archive run.tar.gz     # for --own_data
"""

from cotrain.common.errors import announce_imports, require_writable, run_script  # isort: skip
import contextlib
import glob
import hashlib
import itertools
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from cotrain.common.atomic_files import check_target
from cotrain.common.flags import ArgumentsError, Flags, flag, format_size, parse_size, require, require_apart
from cotrain.common.progress_bar import ProgressBar
from cotrain.common.run_folder import ADAPTERS
from cotrain.common.weights import check_model, weight_files
from cotrain.data.manifest import Manifest
from cotrain.models.objectives import DEFAULT_OBJECTIVE, OBJECTIVES
from cotrain.options import DATASET_FOLDERS
from cotrain.preparation.corpus import Corpus, Source, open_corpus, read_corpus
from cotrain.settings import BASE_FOLDER

# The rest is imported where it is used: datasets and transformers take seconds, for which --help need not wait.

LANGUAGES = Path(__file__).resolve().parent / "cotrain/preparation/languages.txt"  # with sentences, by code
BYTES_PER_CHARACTER = 1.5  # of samples: 4.6 characters of English are a token of 7 bytes, for clm of 5
LARGE = 1e9  # bytes of an archive, from which on shards shorten the start of a trainer
# What the folders have, and --overwrite replaces
DATASET_FILES = ("manifest.json", "dataset_dict.json", "archive.sha256", "preview.txt", "train", "validation")
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "archive.sha256")


@dataclass
class TokenizationArguments(Flags, group="Tokenization"):
    """From text to a dataset that every trainer can load."""

    dataset_name: str = flag(
        "Salesforce/wikitext",
        "Dataset on the Hugging Face Hub, or a folder with train and validation as .txt, .jsonl, .csv or .parquet",
    )
    dataset_config_name: str | None = flag(None, "Configuration of the dataset. Default for WikiText: wikitext-103-v1")
    dataset_revision: str | None = flag(
        None,
        "Branch, tag or commit of the dataset on the Hub. Default: the newest; for BookCorpus, refs/convert/parquet, "
        "the Hub's copy of a dataset that is a Python script",
    )
    train_file: str | None = flag(
        None,
        "File to use instead of --dataset_name: text, .jsonl, .csv or .parquet, also compressed; or 'FOLDER/*.txt'. "
        "A text file is a document, except for WikiText, whose documents end at titles; see --row_is",
    )
    text_column: str = flag("text", "Column of a dataset, or of .jsonl, .csv or .parquet, that has the text")
    row_is: Literal["document", "line"] | None = flag(
        None,
        "What a row of the source is. For line, documents end at blank lines or, as in WikiText, at titles. Default: "
        "of WikiText and BookCorpus a line, of others a document; a text file is one document",
    )
    encoding: str | None = flag(None, "Encoding of text files. Default: found, and printed if it is not UTF-8")
    without_samples: bool = flag(False, "Read no text: write tokenizer and manifest alone, for a run of --own_data")
    sample: bool = flag(False, "Use the documentation topics included with Python as the text. Nothing is downloaded")
    train_on: Literal["all", "last"] = flag("all", "Answers of a conversation to learn, without those of weight 0")
    chosen_only: bool = flag(False, "Take the good answers of preference data, which is refused otherwise")
    max_left_out: float = flag(
        0.05, "Fraction of the conversations that may be left out as damaged or too long", at_least=0, at_most=1
    )
    preview: int = flag(2, "Number of samples to show and to write to preview.txt in --output_path", at_least=0)
    validation_fraction: float = flag(
        0.05, "Fraction of the documents to hold out for validation if the source has no validation split", below=1
    )
    tokenizer: str = flag("albert-large-v2", "Tokenizer: a name on the Hugging Face Hub or a local folder")
    train_tokenizer: bool = flag(
        False,
        "Train a tokenizer on the text instead of loading one: for mlm_sop ALBERT's kind, for mlm RoBERTa's, for clm "
        "GPT-2's. Nothing is downloaded",
    )
    vocab_size: int = flag(30000, "Size of the vocabulary for --train_tokenizer")
    objective: Literal[tuple(OBJECTIVES)] = flag(
        DEFAULT_OBJECTIVE,
        "Training objective of the data: " + ", ".join(f"{key} ({x.description})" for key, x in OBJECTIVES.items()),
    )
    chat_template: str | None = flag(
        None, "With --objective chat: file with a chat template (Jinja) to use instead of that of --tokenizer"
    )
    allow_lost_text: bool = flag(False, "Allow a tokenizer that loses more than a hundredth of the text")
    language: str = flag("en", "Language of the text, as an ISO 639 code; it determines where sentences end")
    max_seq_length: int = flag(512, "Maximum number of tokens per sample, including special tokens", at_least=8)
    output_path: str | None = flag(
        None,
        "Folder for the tokenized dataset. Default: data/tokenized; for WikiText and ALBERT "
        "data/albert_tokenized_wikitext",
        aliases=["--dataset_path"],
    )
    tokenizer_path: str = flag("data/tokenizer", "Folder for the tokenizer")
    cache_dir: str | None = flag("data/cache", "Folder for downloads and intermediate files")
    archive: str | None = flag(None, "Also pack dataset, tokenizer and manifest into this .tar.gz for hosting")
    base: str | None = flag(None, "Folder with a pretrained model to add to --archive, as data/model")
    shard_size: str | None = flag(
        None,
        "For data above 1 GB: write the training text as shards beside --archive, which lists them. A shard takes "
        "about this much of a trainer's disk, such as 256MB. The same command continues an interrupted preparation",
    )
    num_proc: int = flag(2, "Number of worker processes. The result does not depend on it; lower it to save memory")
    seed: int = flag(0, "Random seed: where segments are split and swapped, which documents are held out", at_least=0)
    overwrite: bool = flag(False, "Replace an existing dataset")
    debug: bool = flag(False, "Log more, and show the traceback of a fatal error")

    def __post_init__(self):
        super().__post_init__()
        if self.train_file is not None and Path(self.train_file).is_dir():
            self.dataset_name, self.train_file = self.train_file, None
        if self.without_samples:
            has_source = self.sample or self.train_tokenizer or self.train_file or self.shard_size
            require(not has_source, "--without_samples reads no text: pass --tokenizer, and no source of text")
            self.dataset_name = ""
        is_wikitext = self.dataset_name.endswith("wikitext") and not (self.sample or self.train_file)
        if self.output_path is None:
            self.output_path = DATASET_FOLDERS[is_wikitext and self.objective == DEFAULT_OBJECTIVE]
        require_apart("output_path", self.output_path, "tokenizer_path", self.tokenizer_path)
        is_lacking = self.sample or self.train_tokenizer or is_wikitext or self.tokenizer == type(self).tokenizer
        what = "--objective chat needs --train_file or --dataset_name with conversations, and the model's --tokenizer"
        require(self.objective != "chat" or not is_lacking, what)
        require(not (self.sample and self.train_file), "pass either --sample or --train_file, not both")
        is_file = self.train_file is None or Path(self.train_file).exists()
        is_file = is_file or any(map(os.path.isfile, glob.glob(self.train_file, recursive=True)))
        require(is_file, f"--train_file: there is no file '{self.train_file}'")
        is_template = self.chat_template is None or (self.objective == "chat" and Path(self.chat_template).is_file())
        require(is_template, f"--chat_template needs --objective chat and a file: '{self.chat_template}'")
        names = dict(line.split(" ", 1) for line in LANGUAGES.read_text(encoding="utf-8").splitlines())
        near = get_close_matches(self.language.title(), names.values()) or ["English", "Thai"]
        known = ", ".join(f"{code} ({name})" for code, name in names.items() if name in near)
        require(self.language in names, f"--language '{self.language}' is not known: pass an ISO 639 code: {known}, …")
        if self.shard_size is not None:
            parse_size("--shard_size", self.shard_size)
            has_name = re.fullmatch(r"[A-Za-z0-9][\w.-]{0,90}", Path(self.archive or "").name, re.ASCII) is not None
            require(has_name, "--shard_size needs --archive with a file name of letters, digits, '.', '_' and '-'")
        if self.archive is not None and not self.archive.endswith((".tar.gz", ".tgz")):
            raise ArgumentsError(f"--archive {self.archive}: it is compressed; pass a name that ends in .tar.gz")
        if self.base is not None:
            require(self.archive is not None, "--base also needs --archive")
            names = ["config.json", *weight_files(Path(self.base))]
            lacking = ", ".join(name for name in names if not Path(self.base, name).is_file())
            what = f"--base: there is no model with config.json and model.safetensors in '{self.base}'"
            require(not lacking or Path(self.base, ADAPTERS).is_file(), f"{what}: it lacks {lacking:.200}")
            check_model("--base", Path(self.base))
        if self.dataset_config_name is None and self.dataset_name.endswith("wikitext"):
            self.dataset_config_name = "wikitext-103-v1"
        if self.dataset_name in ("bookcorpus", "bookcorpus/bookcorpus"):
            self.dataset_revision = self.dataset_revision or "refs/convert/parquet"
            self.row_is = self.row_is or "line"


def main() -> None:
    from cotrain.common.argument_parser import parse_arguments

    (args,) = parse_arguments([TokenizationArguments], __doc__)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if args.num_proc == 1 else "false"  # threads or processes, not both
    if not sys.stderr.isatty():
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # they write hundreds of lines into a log
    if args.archive is not None:
        check_target(Path(args.archive), "--archive", args.overwrite)
    require_writable(Path(args.output_path).parent, "--output_path")
    require_writable(Path(args.cache_dir or "."), "--cache_dir")
    announce_imports()
    from cotrain.data.archive import DATASET, TOKENIZER, unpack_head, write_archive
    from cotrain.data.archive_folders import write_receipt
    from cotrain.preparation.saving import summarize

    started = time.perf_counter()
    print(summarize(prepare(args)) or "No samples: each trainer brings its own")
    for path in (args.output_path, args.tokenizer_path):
        size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
        print(f"{path}: {format_size(size)}")
    if args.archive is not None:
        # With these names trainers find the folders if the archive is unpacked in the project's folder.
        folders = {DATASET: Path(args.output_path), TOKENIZER: Path(args.tokenizer_path)}
        folders |= {} if args.base is None else {BASE_FOLDER: Path(args.base)}
        digest = write_archive(Path(args.archive), folders)
        for name in (DATASET, TOKENIZER):
            write_receipt(folders[name], digest)
        print(f"Archive {args.archive}, SHA-256 {digest}")
        if Path(args.archive).stat().st_size > LARGE:
            print(f"For monitors, --dataset_head_sha256 {unpack_head(Path(args.archive), {})}")
            print("Volunteers download all of it before they begin; --shard_size 256MB lets them begin with a part")
    print(f"Done in {time.perf_counter() - started:.0f} s")


@contextlib.contextmanager
def open_work(args: TokenizationArguments) -> Iterator[Path]:
    """Yield a folder for intermediate files: with --shard_size one that the same command finds again."""
    from cotrain.common.atomic_files import lock_folder, temporary_folder
    from cotrain.preparation.sources import describe_files

    path = Path(args.cache_dir or Path(args.output_path).parent) / "work"
    if args.shard_size is None:
        with temporary_folder(path) as work:
            yield work
        return
    others = {"num_proc", "debug", "preview", "overwrite", "output_path", "tokenizer_path", "cache_dir"}
    settings = [(name, value, describe_files(value)) for name, value in asdict(args).items() if name not in others]
    settings.sort(key=lambda setting: setting[0])
    work = path.with_name(f"work-{hashlib.sha256(repr(settings).encode()).hexdigest()[:12]}")
    for other in sorted({*path.parent.glob("work-*")} - {work}):
        print(f"'{other}' is of an unfinished preparation with another text or other flags; remove it if it has ended")
    with lock_folder(work, "--cache_dir"):
        yield work
    shutil.rmtree(work)


def prepare(args: TokenizationArguments) -> Manifest:
    """Make dataset, tokenizer and manifest, or shards."""
    from cotrain.common.atomic_files import new_folder
    from cotrain.models.vocabulary import tokenizer_sha256, vocabulary_size
    from cotrain.preparation.lost_text import check_losses
    from cotrain.preparation.packing import PackingConfig
    from cotrain.preparation.saving import open_encoder, save_dataset

    # Fail early: check outputs first, then inputs.
    part_chars = math.inf
    if args.shard_size is not None:
        part_chars = parse_size("--shard_size", args.shard_size) / BYTES_PER_CHARACTER
    path, dataset_path = Path(args.tokenizer_path), Path(args.output_path)
    marks = ("tokenizer_config.json", "tokenizer.json")
    target = new_folder(path, "--tokenizer_path", args.overwrite, marks, TOKENIZER_FILES)
    is_chat = args.objective == "chat"  # changes the tokenizer, see set_end_of_turn
    if is_kept := not (args.train_tokenizer or is_chat) and Path(args.tokenizer).resolve() == path.resolve():
        target = contextlib.nullcontext(path)
    with (
        new_folder(dataset_path, "--output_path", args.overwrite, ("manifest.json",), DATASET_FILES) as dataset_folder,
        # Entered after the dataset's folder, so complete before it: a dataset never lacks its tokenizer.
        target as tokenizer_folder,
        open_work(args) as work,
    ):
        source = None if args.without_samples else open_source(args, work)
        corpus = {} if source is None else read_text(source, args, work, part_chars)
        build_tokenizer(args, corpus, None if is_kept else tokenizer_folder)
        encoder = open_encoder(str(tokenizer_folder))
        flag = "--train_tokenizer" if args.train_tokenizer else "--tokenizer"
        config = PackingConfig(args.objective, args.max_seq_length, args.seed, args.language)
        archive = None if args.shard_size is None else Path(args.archive)
        options = config, args.num_proc, work, dataset_folder, archive, args.max_left_out, args.preview
        splits, shards = {}, []
        if corpus:
            check_losses(encoder, corpus, args.seed, flag, args.allow_lost_text)
            splits, shards = save_dataset(corpus, tokenizer_folder, *options)
        # The manifest is published: no local path.
        name = Path(args.tokenizer).resolve().name if Path(args.tokenizer).is_dir() else args.tokenizer
        manifest = Manifest(
            source=source.name if source else "the trainers' own text",
            **asdict(config),
            tokenizer="trained on this text" if args.train_tokenizer else name,
            tokenizer_class=type(encoder.tokenizer).__name__,
            vocab_size=vocabulary_size(encoder.tokenizer),
            tokenizer_sha256=tokenizer_sha256(encoder.tokenizer),
            splits=splits,
            shards=shards,
        )
        manifest.save(dataset_folder)
    return manifest


def read_text(source: Source, args: TokenizationArguments, work: Path, part_chars: float) -> dict[str, Corpus]:
    """Return the documents of a source, which an interrupted preparation may have read already."""
    from cotrain.common.atomic_files import new_folder

    if (text := work / "text").exists():
        print(f"Continuing the preparation in '{work}'")
    else:
        with new_folder(text, "--cache_dir") as folder:
            read_corpus(source, folder, part_chars, args.max_left_out)
    return open_corpus(source, text, args.validation_fraction, args.seed)


def open_source(args: TokenizationArguments, work: Path):
    """Return the source of the text, or of the conversations, that the flags name."""
    from cotrain.preparation.chat_shapes import ChatReader
    from cotrain.preparation.sources import open_dataset, open_files, open_sample

    column = ChatReader(args.train_on, args.chosen_only) if args.objective == "chat" else args.text_column
    if args.sample:
        source = open_sample()
    elif args.train_file is not None:
        source = open_files(args.train_file, work, column, args.encoding)
    else:
        options = {"revision": args.dataset_revision, "cache_dir": args.cache_dir}
        options["streaming"] = args.shard_size is not None
        source = open_dataset(args.dataset_name, args.dataset_config_name, column, args.encoding, **options)
    if args.row_is is None:
        return source
    return replace(source, has_lines=args.row_is == "line", has_files=False)


def build_tokenizer(args: TokenizationArguments, corpus: dict[str, Corpus], folder: Path | None) -> None:
    """Train or load the tokenizer, check its special tokens, and save it in a folder unless it is there."""
    from cotrain.data.tokenizers import check_special_tokens, load_tokenizer
    from cotrain.preparation.conversations import drop_reasoning, report_begin, set_end_of_turn
    from cotrain.preparation.saving import GROUP_CHARS
    from cotrain.preparation.tokenizer_training import TRAINING_CHARS, train_tokenizer

    if args.train_tokenizer:
        # Of all splits: without the characters of the validation text, these would be unknown in small texts.
        samples = (part.sample(TRAINING_CHARS // len(x), args.seed) for x in corpus.values() for part in x)
        texts = itertools.chain.from_iterable(samples)
        sample = ProgressBar(texts, desc="Training a tokenizer", unit=" documents", delay=1)
        tokenizer = train_tokenizer(sample, args.objective, args.vocab_size, args.max_seq_length)
    else:
        training = "" if args.objective == "chat" else ", or pass --train_tokenizer to train one"
        remedy = f"pass another tokenizer, or go online{training}"
        tokenizer = load_tokenizer(args.tokenizer, "--tokenizer", remedy, use_hub=True, cache_dir=args.cache_dir)
    if args.objective == "chat":
        if args.chat_template is not None:
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8-sig")
        set_end_of_turn(tokenizer)
        groups = (group.read() for part in corpus.get("train", ()) for group in part.divide(GROUP_CHARS))
        drop_reasoning(tokenizer, itertools.chain.from_iterable(groups))
        report_begin(tokenizer)
    check_special_tokens(tokenizer, args.objective)
    if folder is not None:
        tokenizer.init_kwargs["objective"] = args.objective  # for monitors, which have no data; see set_objective
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    run_script(main)
