"""Workarounds for hivemind 1.1.12 in the DHT and in libp2p's daemon; those in averaging are in lib/averaging.

`SafeDHT` continues when a process that has called it dies, and `use_only_trusted_relays` makes a peer behind NAT
reachable in seconds instead of minutes.
"""

from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

from hivemind.dht import DHT
from hivemind.dht import node as dht_node
from hivemind.p2p import P2P


class RelayedP2P(P2P):
    """libp2p's daemon, with the relays that it is given and no others."""

    @staticmethod
    def _make_process_args(*args, **kwargs) -> list[str]:
        if "trustedRelays" in kwargs:
            kwargs["relayDiscovery"] = False
        return P2P._make_process_args(*args, **kwargs)


def use_only_trusted_relays() -> None:
    """Let DHTs that are built from now on use their `trusted_relays` at once.

    hivemind lets libp2p look for others, too, and then libp2p takes none before it knows four or has waited for three
    minutes.
    """
    dht_node.P2P = RelayedP2P


class _Inbox:
    """The end of a pipe at which a DHT receives its calls; skips those of processes that have died since.

    Averagers call it to the last, and a call names the socket at which its sender waits for the answer.
    """

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.fileno, self.poll = pipe.fileno, pipe.poll

    def recv(self) -> tuple[str, list, dict]:
        """The name of a method and its arguments."""
        message = self.pipe.recv_bytes()
        try:
            return ForkingPickler.loads(message)
        except (OSError, EOFError, RuntimeError):
            return "skip_call", [], {}


class SafeDHT(DHT):
    """hivemind's, which ends with a traceback or is deaf for three seconds if a process dies that has called it."""

    def run(self) -> None:
        self._inner_pipe = _Inbox(self._inner_pipe)
        super().run()

    async def skip_call(self) -> None:
        pass
