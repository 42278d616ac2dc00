"""Published configurations, shrunk in width, layers and experts, train two steps; docs/own-model.md lists them."""

import json
import math

import pytest
import torch

from arguments import ModelArguments
from cotrain.models.config import find_model_classes
from cotrain.models.model import load_config
from cotrain.models.objectives import OBJECTIVES
from cotrain.options import NOTHING
from tests.models.test_families import make_tokenizer
from tests.models.test_published_configs import PUBLISHED
from tests.support.models import build_model
from tests.support.processes import ROOT

WIDTHS = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "embedding_size": 32, "intermediate_size": 128,
    "word_embed_proj_dim": 32, "ffn_dim": 128, "hidden_dim": 128, "moe_intermediate_size": 32,
    "intermediate_size_mlp": 128, "decoder_ffn_dim": 128, "encoder_ffn_dim": 128, "d_inner": 128,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "head_dim": 16, "d_head": 16,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "time_step_rank": 4,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "rotary_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "block_dim": 64, "conv_dim": 64, "conv_dim_out": 64, "block_ff_dim": 128, "intra_bottleneck_size": 32,
    "max_position_embeddings": 4096, "n_positions": 512, "first_k_dense_replace": 1, "attention_head_size": 16,
}  # fmt: skip
LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"}
OF_EACH_LAYER = {"layer_types", "layers_block_type", "attention_layers", "moe_layers", "no_rope_layers",
                 "mlp_layer_types", "hybrid_override_pattern"}  # fmt: skip
VOCABULARY = 600
# name -> layers that are kept, which show each kind
NAMES = {
    "google-bert/bert-base-uncased": 2, "FacebookAI/roberta-base": 2, "distilbert/distilbert-base-uncased": 2,
    "albert/albert-base-v2": 2, "google/electra-small-generator": 2, "microsoft/deberta-v3-base": 2,
    "answerdotai/ModernBERT-base": 4, "facebook/bart-base": 2, "openai-community/gpt2": 2, "EleutherAI/pythia-70m": 2,
    "EleutherAI/gpt-neo-125m": 2, "facebook/opt-350m": 2, "bigscience/bloom-560m": 2, "tiiuae/falcon-7b": 2,
    "meta-llama/Meta-Llama-3.1-8B": 2, "mistralai/Mistral-7B-Instruct-v0.3": 2, "Qwen/Qwen3-30B-A3B-FP8": 2,
    "google/gemma-3-1b-pt": 6, "microsoft/phi-2": 2, "openai/gpt-oss-20b": 2, "allenai/OLMo-2-0425-1B": 2,
    "deepseek-ai/DeepSeek-R1": 2, "state-spaces/mamba-130m-hf": 2, "LiquidAI/LFM2-350M": 4,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 7,
}  # fmt: skip


def shrink(fields: dict, layers: int) -> dict:
    """Return the fields of a small model of the same kind."""
    small = dict(fields)
    for key, value in fields.items():
        if key in LAYERS:
            small[key] = layers
        elif key in OF_EACH_LAYER and value is not None:
            small[key] = value[:layers]
        elif key in WIDTHS and value and value > 0:
            small[key] = min(value, WIDTHS[key])
    if "attention_types" in fields:
        small["attention_types"] = [[["global", "local"], layers // 2]]
    if "full_attn_idxs" in fields:
        small["full_attn_idxs"] = [index for index in fields["full_attn_idxs"] if index < layers]
    if fields.get("num_attention_heads") == fields.get("num_key_value_heads") and "num_key_value_heads" in fields:
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_shrunk_model_trains(name):
    fields = shrink(PUBLISHED[name], NAMES[name])
    objective = next(iter(find_model_classes(fields["model_type"])))
    config = load_config(ModelArguments(json.dumps(fields)), NOTHING, make_tokenizer(objective))
    model = build_model(config, "run").eval()  # without dropout, a step lowers the loss on its batch
    tokens = torch.randint(5, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    if OBJECTIVES[objective].has_sentence_order:
        batch["sentence_order_label"] = torch.tensor([0, 1, 0, 1])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(2):
        losses.append(model(**batch).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    first, second = (loss.item() for loss in losses)
    print(f"{name}: {config.model_type}, {objective}, {model.num_parameters():,}: {first:.2f}, {second:.2f}")
    expected = math.log(VOCABULARY) + (math.log(2) if objective == "mlm_sop" else 0)
    assert first == pytest.approx(expected, rel=0.1), "it is uniform at the start"
    assert second < first
    assert f"`{config.model_type}`" in (ROOT / "docs/own-model.md").read_text(encoding="utf-8")
