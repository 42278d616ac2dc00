"""Names that are derived from peer IDs."""

import re

from cotrain.common.names import derive_name


def test_names_differ_and_are_the_same_on_every_machine():
    assert derive_name("QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG") == "lucky-bear-54db"
    names = {derive_name(f"Qm{number}") for number in range(1000)}
    assert len(names) == 1000 and max(map(len, names)) <= 64
    assert all(re.fullmatch("[a-z]+-[a-z]+-[0-9a-f]{4}", name) for name in names)
