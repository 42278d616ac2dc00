from typing import Any

from hivemind.p2p.p2p_daemon import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID

class StubBase:
    # A class of stubs is generated from the methods `rpc_*` of the class that answers
    def __getattr__(self, name: str) -> Any: ...

class ServicerBase:
    async def add_p2p_handlers(
        self, p2p: P2P, wrapper: Any = None, *, namespace: str | None = None, balanced: bool = False
    ) -> None: ...
    async def remove_p2p_handlers(self, p2p: P2P, *, namespace: str | None = None) -> None: ...
    @classmethod
    def get_stub(cls, p2p: P2P, peer: PeerID, *, namespace: str | None = None) -> StubBase: ...
