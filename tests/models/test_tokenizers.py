"""Tokenizers as people find them: files alone, pointers, the wrong class."""

import io
import json

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from cotrain.common.errors import UserError
from cotrain.data.tokenizers import check_special_tokens, load_tokenizer

TEXT = ["the value of the list is a number", "ein Wert der Liste", "a text of words and letters"] * 50
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2203239\n"


def write_words(folder, words: list[str], **files: str) -> None:
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]), encoding="utf-8"
    )


def write_pair(folder, special: list[str]) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.model.save(str(folder))


def write_json(folder, model, trainer) -> None:
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(TEXT, trainer)
    backend.save(str(folder / "tokenizer.json"))


def write_pieces(folder, name: str, symbols: list[str]) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, vocab_size=40, control_symbols=symbols, minloglevel=2,
        hard_vocab_limit=False, pad_id=3,
    )  # fmt: skip
    (folder / name).write_bytes(model.getvalue())


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
PIECES = trainers.WordPieceTrainer(vocab_size=100, special_tokens=BERT, show_progress=False)
WORD_LEVEL = trainers.WordLevelTrainer(vocab_size=100, special_tokens=["<unk>", "<|endoftext|>"], show_progress=False)
UNIGRAM = trainers.UnigramTrainer(vocab_size=60, special_tokens=ROBERTA, unk_token="<unk>", show_progress=False)

# name -> what writes the files, class of the tokenizer, objective that takes it
ALONE = {
    "vocab.txt": (lambda folder: write_words(folder, ["the", "value", "list"]), "BertTokenizer", "mlm"),
    "pair of GPT-2": (lambda folder: write_pair(folder, ["<|endoftext|>"]), "GPT2Tokenizer", "clm"),
    "pair of RoBERTa": (lambda folder: write_pair(folder, ROBERTA), "RobertaTokenizer", "mlm"),
    "WordPiece": (lambda x: write_json(x, models.WordPiece(unk_token="[UNK]"), PIECES), "TokenizersBackend", "mlm"),
    "words": (lambda x: write_json(x, models.WordLevel(unk_token="<unk>"), WORD_LEVEL), "TokenizersBackend", "clm"),
    "Unigram": (lambda folder: write_json(folder, models.Unigram(), UNIGRAM), "TokenizersBackend", "mlm"),
    "ALBERT": (lambda x: write_pieces(x, "spiece.model", ["[CLS]", "[SEP]", "[MASK]"]), "AlbertTokenizer", "mlm_sop"),
}


@pytest.mark.parametrize("name", ALONE)
def test_files_alone_whose_class_is_clear(name, tmp_path):
    write, expected, objective = ALONE[name]
    folder = tmp_path / "found"
    folder.mkdir()
    write(folder)
    before = sorted(path.name for path in folder.iterdir())
    tokenizer = load_tokenizer(str(folder))
    check_special_tokens(tokenizer, objective)
    assert type(tokenizer).__name__ == expected
    assert sorted(path.name for path in folder.iterdir()) == before, "the user's folder is left as it is"
    tokenizer.save_pretrained(tmp_path / "prepared")
    again = load_tokenizer(str(tmp_path / "prepared"))
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again("the value of the list").input_ids == tokenizer("the value of the list").input_ids


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize(
    ("words", "text", "tokens"),
    [
        (["The", "Value", "List", "the"], "The List", ["The", "List"]),
        (["সদস্যের", "##ের", "ভাষা"], "সদস্যের", ["সদস্যের"]),
        (["é", "été"], "été", ["été"]),
        (["the", "list"], "The LIST", ["the", "list"]),
    ],
)
def test_upper_case_and_accents_are_those_of_the_vocabulary(words, text, tokens, has_model, tmp_path):
    write_words(tmp_path, words)
    if has_model:
        (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.tokenize(text) == tokens


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.model", "sentencepiece.bpe.model"])
def test_sentencepiece_of_an_unknown_class_says_what_to_write(name, tmp_path):
    write_pieces(tmp_path, name, [])
    with pytest.raises(UserError, match='write it into a file tokenizer_config.json, .*"LlamaTokenizer"') as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}', encoding="utf-8")
    if name == "spiece.model":
        assert load_tokenizer(str(tmp_path)).eos_token == "</s>"


@pytest.mark.parametrize("config", [None, {"tokenizer_class": "GPT2Tokenizer"}])
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "spiece.model"])
def test_pointer_is_named(name, config, tmp_path):
    write_pair(tmp_path, ["<|endoftext|>"])
    (tmp_path / name).write_text(POINTER, encoding="utf-8")
    if name != "tokenizer.json":
        for other in ("vocab.json", "merges.txt"):
            (tmp_path / other).unlink()
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=f"{name} is a pointer of Git LFS: run git lfs pull") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


WHOLE = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
DAMAGED = {
    "tokenizer.json is damaged or incomplete": {"tokenizer.json": WHOLE[:40]},
    "tokenizer_config.json is damaged or incomplete": {"tokenizer.json": WHOLE, "tokenizer_config.json": "[]"},
    "no tokenizer can be made of tokenizer.json": {"tokenizer.json": '{"a": 1}'},
    "no tokenizer can be made of vocab.json": {
        "vocab.json": "{}", "tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}',
    },
    "no file with a vocabulary": {"notes.txt": "milk"},
    "it has no file with a vocabulary": {"tokenizer_config.json": '{"tokenizer_class": "AlbertTokenizer"}'},
    "tokenizer.json is a folder, not a file": {
        "tokenizer.json/a": "", "tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}',
    },
}  # fmt: skip


@pytest.mark.parametrize("use_hub", [False, True])
@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_file_is_named_in_plain_words(fault, use_hub, tmp_path):
    """'Unterminated string starting at: line 4106 column 9' named no file."""
    for name, content in DAMAGED[fault].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as error:
        load_tokenizer(str(tmp_path), remedy="pass another", use_hub=use_hub)
    start, _, rest = str(error.value).partition(fault)
    assert start.endswith("(") or "it has" in start
    assert rest.endswith("; pass another") and not any(c in rest for c in "`{\n")


@pytest.mark.parametrize("name", ["no-such", "no/such", "a b", "no/such/name"])
def test_name_that_the_hub_does_not_have_is_one_line_of_ours(name, monkeypatch):
    """The Hub library's message is about its own offline mode, or about `repo_type`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as error:
        load_tokenizer(name, "--tokenizer", "pass another", use_hub=True)
    reason = "the Hub does not answer, or has no tokenizer of that name"
    what = f"'{name}' is neither a folder here nor on the Hub ({reason})"
    assert str(error.value) == f"--tokenizer: {what}; pass another"


def test_empty_folder_is_one_line_with_the_reason(tmp_path):
    with pytest.raises(UserError, match="tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value) and "one of: )" not in str(error.value)


def test_missing_special_token_says_where_to_state_it(tmp_path):
    write_json(tmp_path, models.WordPiece(unk_token="[UNK]"), PIECES)
    with pytest.raises(UserError, match=r'tokens eos, .*tokenizer_config.json, such as {"eos_token": "</s>"}'):
        check_special_tokens(load_tokenizer(str(tmp_path)), "clm")


SLOW = {
    "T5": (lambda x: write_pieces(x, "spiece.model", []), "T5Tokenizer"),
    "sentencepiece itself": (lambda x: write_pieces(x, "spiece.model", ["[CLS]", "[SEP]"]), "BertGenerationTokenizer"),
    "PLBart": (lambda x: write_pieces(x, "sentencepiece.bpe.model", []), "PLBartTokenizer"),
    "bytes": (lambda _: None, "ByT5Tokenizer"),
    "CTRL": (lambda x: write_pair(x, ["<unk>"]), "CTRLTokenizer"),
    "Gemma": (lambda x: write_pieces(x, "tokenizer.model", []), "GemmaTokenizer"),
}


def describe(tokenizer) -> dict:
    encoded = tokenizer("The value of the list: <custom>, [MASK] Ünï 12\n <s>")
    return {
        "class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab(), "encoded": dict(encoded),
        "decoded": tokenizer.decode(encoded.input_ids), "special": tokenizer.special_tokens_map,
        "added": {key: repr(token) for key, token in tokenizer.added_tokens_decoder.items()},
        "others": (tokenizer.model_max_length, tokenizer.chat_template, tokenizer.init_kwargs.get("objective")),
    }  # fmt: skip


@pytest.mark.parametrize("name", [*ALONE, *SLOW])
def test_prepared_folder_is_read_as_transformers_reads_it(name, tmp_path, monkeypatch):
    """The reader of our own takes the files and options that a preparation writes: those of published runs."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write, kind = (ALONE | SLOW)[name][:2]
    (tmp_path / "found").mkdir()
    write(tmp_path / "found")
    if name in SLOW:
        (tmp_path / "found/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}), encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path / "found"), use_hub=True)
    assert describe(load_tokenizer(str(tmp_path / "found"))) == describe(tokenizer)
    tokenizer.add_tokens([AddedToken("<custom>", lstrip=True), "two words"])
    tokenizer.model_max_length, tokenizer.chat_template = 77, "{{ messages }}"
    tokenizer.init_kwargs["objective"] = "chat"
    tokenizer.save_pretrained(tmp_path / "prepared")
    own = load_tokenizer(str(tmp_path / "prepared"))
    assert describe(own) == describe(load_tokenizer(str(tmp_path / "prepared"), use_hub=True))
    assert describe(own)["others"] == (77, "{{ messages }}", "chat")
    own.save_pretrained(tmp_path / "checkpoint")
    assert describe(load_tokenizer(str(tmp_path / "checkpoint"))) == describe(own)


SECRET = "-----BEGIN-KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU\n"
BERT_CONFIG = {"tokenizer_class": "BertTokenizer"}
# name -> tokenizer_config.json, special_tokens_map.json; PATH is a file elsewhere
FOREIGN = {
    "init_inputs": ({**BERT_CONFIG, "init_inputs": ["PATH"]}, {}),
    "vocab": ({**BERT_CONFIG, "vocab": "PATH"}, {}),
    "vocab_file": ({**BERT_CONFIG, "vocab_file": "PATH"}, {}),
    "vocabulary in the special tokens": (BERT_CONFIG, {"vocab": "PATH", "vocab_file": "PATH"}),
    "of the old class": ({"tokenizer_class": "BertTokenizerLegacy", "vocab_file": "PATH"}, {"vocab_file": "PATH"}),
    "merges": ({"tokenizer_class": "GPT2Tokenizer", "vocab": {"a": 0}, "merges": "PATH"}, {"merges": "PATH"}),
    "model of sentencepiece": (
        {"tokenizer_class": "BertGenerationTokenizer", "sp_model_kwargs": {"model_file": "PATH"}},
        {"sp_model_kwargs": {"model_file": "PATH"}, "vocab_file": "PATH"},
    ),
    "tokenizer_file": ({"tokenizer_class": "TokenizersBackend", "tokenizer_file": "PATH"}, {"tokenizer_file": "PATH"}),
    "another version's file": ({**BERT_CONFIG, "fast_tokenizer_files": ["PATH", "tokenizer.4.0.0.json"]}, {}),
    "gguf_file": ({**BERT_CONFIG, "gguf_file": "PATH"}, {"gguf_file": "PATH"}),
}  # fmt: skip


@pytest.mark.parametrize("where", ["absolute", "relative"])
@pytest.mark.parametrize("kind", ["text", "tokenizer", "pieces"])
@pytest.mark.parametrize("name", FOREIGN)
def test_no_file_elsewhere_becomes_the_vocabulary(name, kind, where, tmp_path, monkeypatch):
    """A run's tokenizer_config.json names a file of this machine. A monitor saves and uploads what it reads."""
    folder, private = tmp_path / "data/tokenizer", tmp_path / "private"
    folder.mkdir(parents=True)
    private.mkdir()
    monkeypatch.chdir(tmp_path)
    if kind == "text":
        (private / "secret").write_text(SECRET, encoding="utf-8")
    elif kind == "tokenizer":
        write_json(private, models.WordPiece(unk_token="[UNK]"), PIECES)
        (private / "tokenizer.json").rename(private / "secret")
    else:
        write_pieces(private, "secret", [])
    path = str(private / "secret") if where == "absolute" else "private/secret"
    for file, content in zip(("tokenizer_config", "special_tokens_map"), FOREIGN[name], strict=True):
        text = json.dumps(content).replace("PATH", path)
        (folder / f"{file}.json").write_text(text, encoding="utf-8")
    try:
        tokenizer = load_tokenizer(str(folder))
        tokenizer.save_pretrained(tmp_path / "checkpoint")
    except UserError:
        return
    assert not [token for token in tokenizer.get_vocab() if "KEY" in token or "b3Blb" in token or "value" in token]
    assert all(b"b3Blb" not in file.read_bytes() for file in (tmp_path / "checkpoint").iterdir())


def test_large_number_makes_no_vocabulary(tmp_path):
    config = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 10**9}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match="a number in its tokenizer_config.json is too large"):
        load_tokenizer(str(tmp_path))
