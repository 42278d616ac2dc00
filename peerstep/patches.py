"""Assignments to hivemind's modules and classes. hivemind looks these names up itself, so a subclass has no effect.

`SafeDHT.run` in peerstep/peer/node.py makes one more assignment, in the DHT process only.
"""

import functools
import sys
import time

from hivemind.averaging import averager
from hivemind.compression import serialization
from hivemind.dht import dht
from hivemind.p2p import P2P, PeerID
from hivemind.utils import MSGPackSerializer

from peerstep.peer.averager_process import switch_to_safe_loop
from peerstep.peer.clock import run_time
from peerstep.peer.node import receive_raw_data
from peerstep.reports.records import BoundedExtensions
from peerstep.rounds.matchmaking import StepMatchmaking
from peerstep.tensors.compression import Blockwise8Bit

MAX_PEER_ID_BYTES = 64  # they have 34, or up to 42 with the key itself
_init_peer_id = PeerID.__init__


@functools.cache
def apply_patches() -> None:
    """Replace parts of hivemind in this process and in all processes forked later. `start_peer` calls it."""
    for name, module in list(sys.modules.items()):  # some twenty modules have the function under its name
        if name.startswith("hivemind.") and vars(module).get("get_dht_time") is time.time:
            vars(module)["get_dht_time"] = run_time
    PeerID.__init__ = _init_bounded_peer_id
    averager.Matchmaking = StepMatchmaking  # only the round averager uses matchmaking
    averager.switch_to_uvloop = dht.switch_to_uvloop = switch_to_safe_loop
    serialization._BASE_COMPRESSION_TYPES["BLOCKWISE_8BIT"] = Blockwise8Bit()  # restores each format of this project
    P2P.receive_raw_data = staticmethod(receive_raw_data)
    MSGPackSerializer._decode_ext_types = staticmethod(BoundedExtensions(MSGPackSerializer._decode_ext_types))


def _init_bounded_peer_id(self: PeerID, peer_id_bytes: bytes) -> None:
    """hivemind's, for bytes that can be a peer ID: base58 takes 2 s for 50 KB and hours for a message of 4 MiB."""
    if len(peer_id_bytes) > MAX_PEER_ID_BYTES:
        raise ValueError(f"a peer ID has {len(peer_id_bytes)} bytes")
    _init_peer_id(self, peer_id_bytes)
