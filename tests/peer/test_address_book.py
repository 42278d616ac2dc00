"""Tests of the remembered addresses, without peers."""

import json
import socket

from lib.peer.address_book import MAX_ADDRESSES, find_reachable, path_in, select

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_addresses_that_can_be_dialed_are_kept():
    good = [f"/ip4/203.0.113.1/tcp/31337/p2p/{PEER}", f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}"]
    others = [f"/ip4/203.0.113.1/udp/1/quic-v1/p2p/{PEER}", f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}"]
    assert select([*good, *others, *good]) == good
    assert len(select(f"/ip4/203.0.113.1/tcp/{port}/p2p/{PEER}" for port in range(1, 100))) == MAX_ADDRESSES


def test_remembered_addresses_that_answer(tmp_path):
    assert find_reachable(tmp_path) == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_port, closed = server.getsockname()[1], 1
        addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}" for port in (closed, open_port)]
        path_in(tmp_path).write_text(json.dumps(addresses))
        assert find_reachable(tmp_path) == addresses[1:]


def test_damaged_file_is_set_aside(tmp_path):
    for content in ("{", "1", '["/ip4/1.2.3.4/tcp/1/p2p/x"]', "[1]"):
        path_in(tmp_path).write_text(content)
        assert find_reachable(tmp_path) == []
        assert not path_in(tmp_path).exists()
