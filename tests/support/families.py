"""A small model of each family that docs/data.md lists, with its objective."""

from tests.support.peers import TINY_CONFIGS

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
BERT = {**SIZES, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
SLIDING = {"full_attention": {**ROTARY, "rope_theta": 160000.0}, "sliding_attention": ROTARY}

# name -> model type, other fields, objective
FAMILIES = {
    "albert": ("albert", TINY_CONFIGS["albert"], "mlm_sop"),
    "albert-mlm": ("albert", TINY_CONFIGS["albert"], "mlm"),
    "bert": ("bert", TINY_CONFIGS["bert"], "mlm"),
    "bert-causal": ("bert", TINY_CONFIGS["bert"], "clm"),
    "roberta": ("roberta", TINY_CONFIGS["roberta"], "mlm"),
    "distilbert": ("distilbert", TINY_CONFIGS["distilbert"], "mlm"),
    "gpt2": ("gpt2", TINY_CONFIGS["gpt2"], "clm"),
    "llama": ("llama", {**GROUPED, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}, "clm"),
    "qwen3": ("qwen3", {**GROUPED, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}, "clm"),
    "gemma": ("gemma", GROUPED, "clm"),
    "gpt_neox": ("gpt_neox", {**SIZES, "max_position_embeddings": 64, "rotary_pct": 0.25}, "clm"),
    "opt": ("opt", {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "word_embed_proj_dim": 16, "max_position_embeddings": 64, "dropout": 0.0}, "clm"),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 16}, "clm"),
    "modernbert": ("modernbert", {**SIZES, "num_hidden_layers": 3, "local_attention": 8, "rope_parameters": SLIDING,
        "sparse_pred_ignore_index": -100, "max_position_embeddings": 64}, "mlm"),
    "deberta-v3": ("deberta-v2", {**BERT, "type_vocab_size": 0, "relative_attention": True, "position_buckets": 16,
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p", "max_relative_positions": -1,
        "position_biased_input": False}, "mlm"),
    "electra": ("electra", {**BERT, "embedding_size": 16}, "mlm"),
    "xlm-roberta": ("xlm-roberta", {**BERT, "max_position_embeddings": 66}, "mlm"),
    "mobilebert": ("mobilebert", {**BERT, "hidden_size": 64, "embedding_size": 16, "intra_bottleneck_size": 32,
        "num_feedforward_networks": 2}, "mlm"),
}  # fmt: skip
