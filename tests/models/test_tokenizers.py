"""Tokenizers as people find them: files alone, pointers, the wrong class."""

import io
import json

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

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


def test_empty_folder_is_one_line_with_the_reason(tmp_path):
    with pytest.raises(UserError, match="tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value) and "one of: )" not in str(error.value)


def test_missing_special_token_says_where_to_state_it(tmp_path):
    write_json(tmp_path, models.WordPiece(unk_token="[UNK]"), PIECES)
    with pytest.raises(UserError, match=r'tokens eos, .*tokenizer_config.json, such as {"eos_token": "</s>"}'):
        check_special_tokens(load_tokenizer(str(tmp_path)), "clm")
