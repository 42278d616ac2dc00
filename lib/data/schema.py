"""Splits and columns of the prepared data: tokenize_wikitext103.py writes them, trainers and evaluators read them."""

SPLITS = ("train", "validation")

# Columns of the samples, by objective. Their Arrow types are in packing.py.
COLUMNS = {
    "mlm_sop": (
        "input_ids",
        "token_type_ids",
        "attention_mask",
        "special_tokens_mask",
        "sentence_order_label",
    ),
    "mlm": ("input_ids", "attention_mask", "special_tokens_mask"),
    "clm": ("input_ids", "attention_mask"),
}
