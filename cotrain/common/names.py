"""Readable names of peers, derived from their peer IDs."""

import hashlib

# 64 words each, so that a byte selects a word without bias.
ADJECTIVES = (
    "able", "agile", "alert", "amber", "ample", "apt", "bold", "brave", "brief", "bright", "brisk", "busy", "calm",
    "candid", "clear", "clever", "cosy", "crisp", "daring", "deft", "eager", "early", "fair", "fast", "fine", "firm",
    "fluent", "fond", "fresh", "gentle", "glad", "golden", "grand", "happy", "hardy", "honest", "jolly", "keen",
    "kind", "light", "lively", "lucid", "lucky", "mellow", "merry", "mild", "modest", "neat", "noble", "patient",
    "polite", "proud", "quick", "quiet", "ready", "silver", "smart", "steady", "sunny", "swift", "tidy", "vivid",
    "warm", "wise",
)  # fmt: skip
ANIMALS = (
    "alpaca", "badger", "bear", "beaver", "bee", "bison", "camel", "cat", "cod", "crab", "crane", "crow", "deer",
    "dingo", "dolphin", "dove", "duck", "eagle", "egret", "elk", "falcon", "ferret", "finch", "fox", "frog", "gecko",
    "goose", "hare", "hawk", "heron", "ibex", "ibis", "jay", "koala", "lark", "lemur", "lion", "llama", "lynx",
    "magpie", "mole", "moose", "newt", "orca", "otter", "owl", "panda", "pike", "puffin", "raven", "robin", "salmon",
    "seal", "shrew", "sparrow", "stork", "swan", "tapir", "tiger", "toad", "trout", "walrus", "wolf", "wren",
)  # fmt: skip


def derive_name(peer_id: str) -> str:
    """Return the name of a peer that has chosen none, such as quick-otter-3f2a. Different peers may share a name.

    :param peer_id: in base58
    """
    digest = hashlib.sha256(peer_id.encode()).digest()
    return f"{ADJECTIVES[digest[0] % 64]}-{ANIMALS[digest[1] % 64]}-{digest[2:4].hex()}"
