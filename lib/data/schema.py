"""The splits of the prepared data: tokenize_wikitext103.py writes them, trainers and evaluators read them."""

SPLITS = ("train", "validation")
