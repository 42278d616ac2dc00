"""Each family of docs/data.md: build, one step, checkpoint. tests/training/test_families.py has two peers of one."""

import json
import math

import pytest
import torch
from transformers import BertTokenizer, GPT2Tokenizer

from arguments import ModelArguments
from cotrain.common.errors import UserError
from cotrain.models.model import get_model_class, get_objective, load_config, max_tokens, read_config
from cotrain.models.objectives import OBJECTIVES
from cotrain.options import NOTHING
from cotrain.training.pretrained import load_checkpoint
from tests.support.families import FAMILIES
from tests.support.models import build_model

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(objective: str):
    """Return a tokenizer of 600 words as tokenize_wikitext103.py saves it for an objective."""
    words = [*SPECIAL, *(f"w{number}" for number in range(595))]
    if OBJECTIVES[objective].is_causal:
        vocab = {word: index for index, word in enumerate(["<|endoftext|>", "<|pad|>", *words[2:]])}
        tokenizer = GPT2Tokenizer(vocab=vocab, merges=[], pad_token="<|pad|>")
    else:
        tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    tokenizer.init_kwargs["objective"] = objective
    return tokenizer


def build(model_type: str, fields: dict, objective: str):
    args = ModelArguments(json.dumps({**fields, "model_type": model_type}))
    tokenizer = make_tokenizer(objective)
    config = load_config(args, NOTHING, tokenizer)
    assert get_objective(config) == objective
    return build_model(config, "run"), tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_family_takes_a_step_and_its_checkpoint_is_complete(family, tmp_path):
    model_type, fields, objective = FAMILIES[family]
    model, tokenizer = build(model_type, fields, objective)
    assert len(tokenizer) == model.config.vocab_size == 600 and model.training
    length = int(max_tokens(model.config))
    tokens = torch.randint(5, 600, (4, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    extra = {"sentence_order_label": torch.tensor([0, 1, 0, 1])} if objective == "mlm_sop" else {}
    loss = model(**batch, **extra).loss
    assert loss.item() == pytest.approx(math.log(600) + (math.log(2) if extra else 0), rel=0.02)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "every weight is trained"

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_checkpoint(tmp_path)
    assert get_objective(loaded.config) in (objective, "mlm")  # ALBERT's checkpoint is opened for masked LM
    with torch.no_grad():
        outputs = model.eval()(**batch, **extra)
        expected = outputs.prediction_logits if extra else outputs.logits
        assert torch.allclose(loaded(**batch).logits, expected, atol=1e-5)


@pytest.mark.parametrize("family", ["bert-causal", "llama"])
def test_causal_model_does_not_see_later_tokens(family):
    model_type, fields, objective = FAMILIES[family]
    model, _ = build(model_type, fields, objective)
    tokens = torch.arange(5, 21)[None]
    changed = tokens.clone()
    changed[0, 8:] += 100
    one, two = (model.eval()(input_ids=x, attention_mask=torch.ones_like(x)).logits[0] for x in (tokens, changed))
    assert torch.allclose(one[:8], two[:8], atol=1e-6) and not torch.allclose(one[8:], two[8:], atol=1e-3)


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("roberta", {"pad_token_id": 1, "max_position_embeddings": 514}, 512),
        ("xlm-roberta", {"pad_token_id": 0, "max_position_embeddings": 514}, 513),
        ("opt", {"max_position_embeddings": 100}, 100),  # has two more positions
        ("gpt2", {"n_positions": 100}, 100),
        ("mpnet", {"pad_token_id": 1, "max_position_embeddings": 514}, 512),
        ("bloom", {"n_layer": 1}, math.inf),  # no positions, no limit
    ],
)
def test_longest_sequence_is_that_of_the_position_embeddings(model_type, fields, expected):
    assert max_tokens(read_config(json.dumps({"model_type": model_type, **fields}))) == expected


@pytest.mark.parametrize(
    ("model_type", "fields", "objective", "fault"),
    [
        ("bart", {"d_model": 32, "decoder_layers": 1, "encoder_layers": 1}, "clm", "does not predict the next token"),
        ("xmod", {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}, "mlm", "takes no text"),
    ],
)
def test_model_that_does_not_train_on_text_is_refused(model_type, fields, objective, fault):
    with pytest.raises(UserError, match=fault) as error:
        build(model_type, fields, objective)
    assert "\n" not in str(error.value)


def test_fields_that_transformers_reads_without_declaring_them_have_an_effect():
    scaling = {"rope_type": "linear", "factor": 2.0}
    theta = read_config(json.dumps({"model_type": "llama", "rope_theta": 500000, "rope_scaling": scaling}))
    assert theta.rope_parameters == {**scaling, "rope_theta": 500000}
    layers = read_config('{"model_type": "modernbert", "global_attn_every_n_layers": 2, "num_hidden_layers": 4}')
    assert layers.layer_types == ["full_attention", "sliding_attention"] * 2
    assert read_config('{"model_type": "deberta-v2", "position_buckets": 256}').position_buckets == 256


@pytest.mark.parametrize(("name", "parameters"), [("smollm2-135m", 134_515_008), ("modernbert-base", 149_655_232)])
def test_built_in_models_have_their_published_size(name, parameters):
    config = read_config(name)
    with torch.device("meta"):
        assert get_model_class(config)(config).num_parameters() == parameters


def test_a_configuration_that_an_editor_of_windows_saved(tmp_path):
    """With a byte-order mark and its line ends; "Unexpected UTF-8 BOM" was said."""
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"model_type": "modernbert",\r\n"num_hidden_layers": 4}\r\n')
    assert read_config(str(path)).num_hidden_layers == 4
