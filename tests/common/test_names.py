"""Names that are derived from peer IDs."""

from cotrain.common.names import derive_name


def test_name_is_the_end_of_the_peer_id():
    assert derive_name("QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG") == "peer-B7RiXZG"
