"""Splits of the prepared data, which tokenize_wikitext103.py writes, and trainers and evaluators read."""

SPLITS = ("train", "validation")
