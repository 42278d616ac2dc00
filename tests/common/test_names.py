"""Names that are derived from peer IDs."""

import re

import pytest

from lib.common.names import ADJECTIVES, ANIMALS, derive_name


def test_name_is_the_same_on_every_machine_and_after_every_restart():
    assert derive_name("QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG") == "lucky-bear-54db"


@pytest.mark.parametrize("words", [ADJECTIVES, ANIMALS])
def test_words_are_distinct_and_plain(words):
    assert len(words) == len(set(words)) == 64
    assert all(re.fullmatch("[a-z]{2,8}", word) for word in words)


def test_names_of_a_thousand_peers_differ():
    names = {derive_name(f"Qm{number}") for number in range(1000)}
    assert len(names) == 1000 and max(map(len, names)) <= 64
    assert all(re.fullmatch("[a-z]+-[a-z]+-[0-9a-f]{4}", name) for name in names)
