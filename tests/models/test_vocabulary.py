"""The vocabulary: its size, the special tokens in a model's configuration, and what is said of them."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

import tokenize_wikitext103
from arguments import ModelArguments
from cotrain.common.errors import UserError
from cotrain.data.loading import check_dataset, load_manifest, load_split
from cotrain.data.tokenizers import load_tokenizer
from cotrain.models.config import find_model_classes
from cotrain.models.model import load_config, max_tokens, set_special_tokens
from cotrain.models.vocabulary import vocabulary_size
from cotrain.options import NOTHING
from cotrain.preparation import saving
from tests.preparation.test_tokenize_script import arguments
from tests.support.models import build_model
from tests.support.processes import ROOT

WORDS = ["the", "of", "value", "list", "a", "is", "##s", "##e", "##t", "##n", "##a", "##o", "##i", "##r", "text"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_bert(folder, vocabulary: list[str]):
    """Write a BERT tokenizer, as published: a line for each token."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "do_lower_case": true}', encoding="utf-8"
    )
    return folder


def repeated_lines(folder):
    """The five special tokens and `LETTERS` twice; the last ones count."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return make_bert(folder, [*special, *LETTERS, *WORDS, *LETTERS, *(f"##{x}" for x in LETTERS)])


def gaps(folder):
    """A byte-level tokenizer of GPT-2's kind, which names only each second ID."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{letter: 2 * index + 1 for index, letter in enumerate(alphabet)}}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("make", "objective", "size"), [(repeated_lines, "mlm", 98), (gaps, "clm", 512)])
def test_vocabulary_with_repeated_lines_or_gaps(make, objective, size, tmp_path):
    flags = {"objective": objective, "tokenizer": str(make(tmp_path / "published")), "allow_lost_text": True}
    manifest = tokenize_wikitext103.prepare(arguments(tmp_path, **flags))
    tokenizer, dataset = load_tokenizer(str(tmp_path / "tokenizer")), str(tmp_path / "dataset")
    assert len(tokenizer) < vocabulary_size(tokenizer) == manifest.vocab_size == size
    check_dataset(dataset)
    assert len(tokenizer) <= max(max(ids) for ids in load_split(dataset, "train")["input_ids"]) < size
    model_type = "bert" if objective == "mlm" else "llama"
    config = load_config(ModelArguments(json.dumps({"model_type": model_type, **SIZES})), NOTHING, tokenizer)
    load_manifest(dataset, tokenizer, objective, max_tokens(config))
    assert build_model(config, "run").get_input_embeddings().num_embeddings == size


def test_data_with_ids_outside_of_the_vocabulary_is_not_published(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "vocabulary_size", len)
    flags = {"objective": "mlm", "tokenizer": str(repeated_lines(tmp_path / "published")), "train_tokenizer": False}
    with pytest.raises(UserError, match="does not keep to its vocabulary"):
        tokenize_wikitext103.prepare(arguments(tmp_path, **flags, allow_lost_text=True))
    assert not (tmp_path / "dataset").exists()


def test_preparation_imports_no_torch():
    code = "import sys, cotrain.data.loading; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


# Special tokens


@pytest.fixture
def tokenizer(tmp_path):
    return AutoTokenizer.from_pretrained(repeated_lines(tmp_path / "bert"))


@pytest.fixture
def messages(caplog):
    """Return a function that returns all messages so far, also those of transformers, which do not propagate."""
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    transformers_logger.removeHandler(caplog.handler)


TYPES = ("modernbert", "gpt2", "bart", "eurobert", "xlnet", "trocr", "nomic_bert", "modernbert-decoder")


@pytest.mark.parametrize("model_type", TYPES)
def test_special_tokens_are_those_of_the_tokenizer(model_type, tokenizer, messages):
    """Published ones are beyond a vocabulary of one's own, and some classes refuse to have none."""
    config = AutoConfig.for_model(model_type, vocab_size=98)
    set_special_tokens(config, tokenizer)
    config.validate()
    assert not messages()
    tokens = {key: value for key, value in vars(config).items() if key.endswith("token_id")}
    assert {"pad_token_id", "bos_token_id", "eos_token_id"} <= tokens.keys()
    assert all(value is None or 0 <= value < 98 for value in tokens.values())
    assert config.pad_token_id == tokenizer.pad_token_id
    assert tokens.get("cls_token_id", tokenizer.cls_token_id) == tokenizer.cls_token_id


@pytest.mark.parametrize(
    ("fields", "replaced"),
    [({"vocab_size": 5000}, "5000"), ({"vocab_size": 30}, "30"), ({}, "50368"), ({"vocab_size": 98}, None)],
)
def test_replaced_vocabulary_is_one_line(fields, replaced, tokenizer, messages, caplog):
    with caplog.at_level(logging.INFO, "cotrain"):
        config = load_config(
            ModelArguments(json.dumps({"model_type": "modernbert", **SIZES, **fields})), NOTHING, tokenizer
        )
        tokens = torch.ones(1, 8, dtype=torch.long)
        build_model(config, "run")(input_ids=tokens, labels=tokens)
    line = f"The model has a vocabulary of 98 tokens, the tokenizer's, instead of {replaced}"
    assert messages() == [line] * (replaced is not None)


def test_a_warning_that_matters_is_shown_alone(tokenizer, messages):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.25,
            "original_max_position_embeddings": 32}  # fmt: skip
    fields = {"model_type": "llama", **SIZES, "bos_token_id": 128000, "vocab_size": 98, "rope_parameters": rope}
    build_model(load_config(ModelArguments(json.dumps(fields)), NOTHING, tokenizer), "run")
    assert len(set(messages())) == 1 and "high_freq_factor" in messages()[0]


def test_vocabulary_of_a_part(tokenizer):
    """Gemma 3 has it in text_config."""
    assert find_model_classes("gemma3") == dict.fromkeys(["clm", "chat"], "Gemma3ForConditionalGeneration")
    text = {**SIZES, "num_key_value_heads": 1, "head_dim": 16}
    vision = {**SIZES, "image_size": 28, "patch_size": 14}
    fields = {"model_type": "gemma3", "text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    config = load_config(ModelArguments(json.dumps(fields)), NOTHING, tokenizer)
    model = build_model(config, "run")
    assert model.get_input_embeddings().num_embeddings == 98
    assert config.text_config.pad_token_id == tokenizer.pad_token_id
