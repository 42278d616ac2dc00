"""Bare libp2p peer that calls every service of another peer, with or without an invitation."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2, dht_pb2
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.asyncio import as_aiter
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.multiaddr import Multiaddr

from peerstep.local_peer import write_private_key
from peerstep.rounds.averager import RoundAverager
from peerstep.state.averager import TrainingStateAverager

EXCHANGE = "collaboration.exchange_invitations.v1"  # spelled out: it is part of the protocol
AVERAGERS = {"round_averager": RoundAverager, "state_averager": TrainingStateAverager}


@contextlib.asynccontextmanager
async def visitor(
    address: str, private_key: RSAPrivateKey | None = None, token: AccessToken | None = None, is_silent: bool = False
) -> AsyncIterator[P2P]:
    """Yield a libp2p client that is connected to a peer.

    :param token: the invitation with which the client answers requests for one
    :param is_silent: whether the client leaves such requests unanswered
    """

    async def show_token(_request: bytes, _peer: PeerID) -> bytes:
        if is_silent:
            await asyncio.Future()
        return MSGPackSerializer.dumps([token.SerializeToString(), b""])

    with tempfile.TemporaryDirectory() as folder:
        write_private_key(private_key or RSAPrivateKey(), Path(folder) / "identity.key")
        p2p = await P2P.create(
            [address], dht_mode="client", identity_path=f"{folder}/identity.key", check_if_identity_free=False,
            no_listen=True,
        )  # fmt: skip
        try:
            if is_silent or token is not None:
                await p2p._client.add_unary_handler(EXCHANGE, show_token)
            yield p2p
        finally:
            await p2p.shutdown()


async def call_services(p2p: P2P, address: str, run_id: str, timeout: float = 20.0) -> dict[str, str]:
    """Call all services of a peer at the same time.

    :param timeout: seconds
    :returns: service -> "answered: TYPE", or the error
    """
    peer = PeerID.from_base58(Multiaddr(address)["p2p"])
    dht = super(DHTProtocol, DHTProtocol).get_stub(p2p, peer)  # without hivemind's wrapper
    key = DHTID.generate().to_bytes()
    store = dht_pb2.StoreRequest(
        keys=[key], values=[MSGPackSerializer.dumps("value")], subkeys=[DHTProtocol.IS_REGULAR_VALUE],
        expiration_time=[get_dht_time() + 60], in_cache=[False],
    )  # fmt: skip
    calls = {
        "rpc_ping": dht.rpc_ping(dht_pb2.PingRequest()),
        "rpc_find": dht.rpc_find(dht_pb2.FindRequest(keys=[key])),
        "rpc_store": dht.rpc_store(store),
    }
    join = averaging_pb2.JoinRequest(schema_hash=b"hash", expiration=get_dht_time() + 30, group_key="1")
    part = averaging_pb2.AveragingData(code=averaging_pb2.PART_FOR_AVERAGING, group_id=b"group")
    for name, averager in AVERAGERS.items():
        stub = averager.get_stub(p2p, peer, namespace=f"{run_id}_{name}")
        calls |= {
            f"{name}.rpc_join_group": _take_first(stub.rpc_join_group(join)),
            f"{name}.rpc_aggregate_part": _take_first(stub.rpc_aggregate_part(as_aiter(part))),
            f"{name}.rpc_download_state": _take_first(stub.rpc_download_state(averaging_pb2.DownloadRequest())),
        }
    outcomes = await asyncio.gather(*(_describe(call, timeout) for call in calls.values()))
    return dict(zip(calls, outcomes, strict=True))


async def _take_first(call) -> object:
    async with contextlib.aclosing(await call) as stream:
        return await anext(stream)


async def _describe(call, timeout: float) -> str:
    try:
        answer = await asyncio.wait_for(call, timeout)
        return f"answered: {type(answer).__name__}"
    except Exception as error:
        return repr(error)


async def visit(address: str, *args, **kwargs) -> dict[str, str]:
    """Call all services of a peer of the run "run" as a new visitor; the parameters are those of `visitor`."""
    async with visitor(address, *args, **kwargs) as p2p:
        return await call_services(p2p, address, "run")


def list_answered(outcomes: dict[str, str]) -> list[str]:
    return [service for service, outcome in outcomes.items() if outcome.startswith("answered")]
