"""A network and a DHT in memory, between peers in one process whose averagers are tasks instead of processes.

The network has no congestion but the links of the peers. The DHT has no lookups: all nodes that reach each other have
the same records, which are neither signed nor validated. Seconds are simulated, see tests/support/simulated_time.py.
"""

import asyncio
import base64
import contextvars
import hashlib
import math
import random
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from hivemind.averaging.control import StepControl
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.utils import MPFuture, MSGPackSerializer
from hivemind.utils.crypto import RSAPublicKey
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.peer.averager_process import SafeAverager
from peerstep.reports.records import RunValidator, signer_of
from peerstep.rounds import known_peers
from peerstep.rounds import uplink as uplink_module
from peerstep.rounds.claims import SIGNATURE_BYTES
from peerstep.rounds.matchmaking import StepMatchmaking
from peerstep.state.averager import TrainingStateAverager
from tests.support.simulated_time import EPOCH, SimulatedTime, owner

attach = StepControl.attach
LATENCY, DIAL_SECONDS, DHT_SECONDS = 0.05, 3.0, 0.1  # of a message, a dial in vain, a DHT request
StepControl._trigger = None  # or `__del__` raises for a handle whose peer has ended while it was built


class SimulatedKey:
    """A private key whose signatures only the network can check: a real key takes 0.1 s, and is not the same again."""

    def __init__(self, subkey: bytes):
        self._secret = b"secret of " + subkey
        start, end = RSASignatureValidator.PUBLIC_KEY_FORMAT.split(b"_key_")
        self._public_key = RSAPublicKey.from_bytes(subkey.removeprefix(start).removesuffix(end))

    def get_public_key(self) -> RSAPublicKey:
        return self._public_key

    def sign(self, content: bytes) -> bytes:
        return base64.b64encode(hashlib.shake_256(self._secret + content).digest(SIGNATURE_BYTES))


def make_subkey(rng: random.Random) -> bytes:
    """Make the subkey of a peer, of a public key to which nobody has a private one: a real key takes 0.1 s."""
    key = RSAPublicKey(RSAPublicNumbers(65537, rng.getrandbits(2048) | 1 | 1 << 2047).public_key())
    return RSASignatureValidator.PUBLIC_KEY_FORMAT.replace(b"_key_", key.to_bytes())


class Node:
    """A peer's part of the network, which stands for its P2P and DHT objects.

    :param uplink: bytes per second; may be changed, as may the downlink
    :param clock: seconds by which its wall clock is ahead
    """

    def __init__(self, network: "Network", uplink: float, client: bool, clock: float):
        self.network, self.clock = network, clock
        self.uplink, self.downlink = uplink, math.inf
        self.subkey = make_subkey(network.rng)
        self.private_key = network.private_keys[self.subkey] = SimulatedKey(self.subkey)
        self.peer_id, self.client_mode, self.is_open = signer_of(self.subkey), client, True
        self._client = self  # of the P2P object, which dials
        self.context = contextvars.copy_context()
        self.context.run(owner.set, self)
        self.averagers: list[SafeAverager] = []
        self.handlers: dict[str, tuple[Callable, bool]] = {}
        self.answered: dict[str, tuple[Callable, bool]] = {}
        self.tasks: set[asyncio.Task] = set()
        self.links_free_at = [0.0, 0.0]  # uplink and downlink
        self.bytes_to_send = 0.0  # since the start, with those that wait for the uplink
        self.ended = self.vanished = False
        self._thawed = threading.Event()
        self._thawed.set()

    # Faults

    def kill(self, silently: bool = True) -> None:
        """End this peer.

        :param silently: as a machine that loses its power; otherwise as a process, whose links are reset
        """
        self.vanished, self.ended = silently, True
        self._thawed.set()
        self.network.time.wake()
        for averager in self.averagers:
            with suppress(OSError):
                averager._inner_pipe.send(("_SHUTDOWN", None))  # for a thread of hivemind's
        self.network.call_in_loop(lambda: [task.cancel() for task in list(self.tasks)])

    def freeze(self) -> None:
        """Stop the threads and the messages of this peer."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def stall(self, method: str) -> None:
        """Answer no further calls of a method such as `rpc_aggregate_part`: it never returns."""
        for name, (_, is_stream) in self.handlers.items():
            if name.endswith(f".{method}"):
                self.handlers[name] = _stall, is_stream

    def recover(self) -> None:
        """Answer all calls again."""
        self.handlers = dict(self.answered)

    @property
    def sent_bytes(self) -> float:
        waiting = max(0.0, self.links_free_at[0] - self.network.time.read()) * self.uplink
        return self.bytes_to_send - waiting

    @property
    def is_frozen(self) -> bool:
        return not self._thawed.is_set()

    def check(self) -> None:
        """Block while this peer is frozen. See SimulatedTime."""
        self._thawed.wait()
        if self.ended:
            raise SystemExit

    # Its averagers' "processes": tasks in the scenario's loop

    def create_task(self, work: Coroutine) -> asyncio.Task | None:
        if self.ended:
            work.close()
            return None
        return self.network.time.loop.create_task(work, context=self.context.copy())

    async def host(self, averager: SafeAverager) -> None:
        """Do what hivemind does in the averager's process."""
        self.averagers.append(averager)
        averager._p2p = self
        if not averager.client_mode:
            await averager.add_p2p_handlers(self, namespace=averager.prefix)
        averager._matchmaking = StepMatchmaking(
            self, averager.schema_hash, self, client_mode=averager.client_mode, **averager.matchmaking_kwargs
        )
        averager._state_updated = asyncio.Event()
        if not averager.client_mode:
            self.create_task(averager._declare_for_download_periodically())

    def send(self, averager: SafeAverager, message: tuple[str, list, dict]) -> None:
        """Call a method in the averager's "process"."""
        self.network.call_in_loop(partial(self._call, averager, *message))

    def _call(self, averager: SafeAverager, method: str, args: list, kwargs: dict) -> None:
        def end(_task: asyncio.Task | None) -> None:
            for value in (*args, *kwargs.values()):
                if self.ended and isinstance(value, MPFuture):  # a thread may wait for it
                    with suppress(Exception):
                        value.cancel()

        task = self.create_task(getattr(averager, method)(*args, **kwargs))
        end(None) if task is None else task.add_done_callback(end)

    async def get_state(self, averager: SafeAverager) -> tuple:
        return None, (), await asyncio.get_running_loop().run_in_executor(None, averager.copy_state)

    # As a P2P object

    async def add_protobuf_handler(self, name: str, handler: Callable, _type, *, stream_input: bool, **_) -> None:
        self.handlers[name] = self.answered[name] = handler, stream_input

    async def connect(self, peer_id: PeerID, _maddrs: list) -> None:
        await self.network.dial(self, peer_id)

    async def iterate_protobuf_handler(self, peer_id: PeerID, name: str, requests: object, _type) -> AsyncIterator:
        callee = await self.network.dial(self, peer_id)
        if name not in callee.handlers:
            raise P2PHandlerError(f"no handler {name}")
        handler, is_stream = callee.handlers[name]
        if is_stream:
            requests = self.network.carry(self, callee, requests)
        return self.network.carry(callee, self, handler(requests, SimpleNamespace(remote_id=self.peer_id)))

    async def call_protobuf_handler(self, peer_id: PeerID, name: str, request: object, _type) -> object:
        callee = await self.network.dial(self, peer_id)
        handler, _ = callee.handlers[name]

        async def answer() -> AsyncIterator:
            yield await handler(request, SimpleNamespace(remote_id=self.peer_id))

        return await anext(self.network.carry(callee, self, answer()))

    # As a DHT

    async def replicate_p2p(self) -> "Node":
        return self

    def store(self, key: str, value: object, expiration_time: float, subkey: bytes, **_) -> None:
        packed = MSGPackSerializer.dumps(value)
        assert len(packed) + len(subkey) <= RunValidator.MAX_BYTES, f"the record under {key} is too large"
        record = ValueWithExpiration(MSGPackSerializer.loads(packed), expiration_time)
        self.network.call_in_loop(partial(self.network.store, self, key, subkey, record), DHT_SECONDS)

    def get(self, key: str, **_) -> MPFuture:
        future = MPFuture()
        self.network.call_in_loop(partial(self.network.answer, self, key, future), DHT_SECONDS)
        return future


async def _stall(_request: object, _context: object) -> AsyncIterator:
    await asyncio.sleep(math.inf)
    yield


def _attach_once(control: StepControl, trigger: MPFuture, cancel: MPFuture) -> None:
    """Attach futures. The trainer and the averager do so, in real life each to its own copy."""
    with suppress(AssertionError):  # they are attached
        attach(control, trigger, cancel)


class Network:
    """Nodes that reach each other, or not. Use it as a context manager: nodes and threads end with it.

    :param seed: of the nodes' IDs
    :param grain: see SimulatedTime
    """

    def __init__(self, seed: int, grain: float):
        self.rng, self.time = random.Random(seed), SimulatedTime(grain)
        self.nodes: list[Node] = []
        self.private_keys: dict[bytes, SimulatedKey] = {}  # by subkey
        self._sides: list[set[Node]] = []  # of a partition; nodes in none of them are another side
        self._cuts: set[frozenset[Node]] = set()
        self._records: dict[int, dict[str, dict[bytes, ValueWithExpiration]]] = {-1: {}}  # side -> key -> subkey
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> "Network":
        self._patches.setattr(SafeAverager, "run_in_background", lambda averager, **_: self._host(averager))
        self._patches.setattr(StepControl, "attach", _attach_once)
        self._patches.setattr(known_peers, "verify", self._verify)
        self._patches.setattr(uplink_module, "sent_bytes", lambda: {"wan": owner.get().sent_bytes})
        self._patches.setattr(TrainingStateAverager, "LEAST_RATE", 1.0)  # the links are as small as the models
        MPFuture()  # starts a thread of hivemind's that stays
        self.time.start()
        return self

    def __exit__(self, *_) -> None:
        for node in self.nodes:
            node.kill()
        self.time.stop()
        self._patches.undo()

    def _verify(self, key: bytes, scope: bytes, entry: bytes) -> bool:
        signature = base64.b64encode(entry[-SIGNATURE_BYTES:])
        return self.private_keys[key].sign(scope + entry[:-SIGNATURE_BYTES]) == signature

    def _host(self, averager: SafeAverager) -> None:
        node = averager.dht
        asyncio.run_coroutine_threadsafe(node.host(averager), self.time.loop).result()
        averager._outer_pipe = SimpleNamespace(send=partial(node.send, averager))
        averager._get_current_state_from_host_process = partial(node.get_state, averager)

    # Faults

    def partition(self, *sides: Collection[Node]) -> None:
        """Let peers of different sides neither reach each other nor share DHT records; the rest is another side."""
        self.heal()
        everything = self._records[-1]
        self._sides = [set(side) for side in sides]
        self._records = {
            side: {key: dict(records) for key, records in everything.items()} for side in range(-1, len(sides))
        }

    def cut(self, peer: Node, *others: Node) -> None:
        """Let a peer not reach others, though all reach the DHT."""
        self._cuts |= {frozenset({peer, other}) for other in others}

    def heal(self) -> None:
        """End all partitions and cuts."""
        merged = self._records[-1]
        for side in range(len(self._sides)):
            for key, records in self._records[side].items():
                for subkey, record in records.items():
                    self._keep(merged, key, subkey, record)
        self._sides, self._cuts, self._records = [], set(), {-1: merged}

    def _side_of(self, peer: Node) -> int:
        return next((index for index, side in enumerate(self._sides) if peer in side), -1)

    def reaches(self, one: Node, other: Node) -> bool:
        if one.ended or other.ended or one.is_frozen or other.is_frozen:
            return False
        return frozenset({one, other}) not in self._cuts and self._side_of(one) == self._side_of(other)

    async def dial(self, caller: Node, peer_id: PeerID) -> Node:
        """Return the peer that has an ID, once the caller has reached it."""
        await asyncio.sleep(LATENCY)
        callee = next((peer for peer in self.nodes if peer.peer_id == peer_id), None)
        if callee is None or callee.client_mode or (callee.ended and not callee.vanished):
            raise P2PDaemonError("cannot be dialed")
        while callee.is_frozen or caller.is_frozen:
            await asyncio.sleep(0.5)
        if not self.reaches(caller, callee):
            await asyncio.sleep(DIAL_SECONDS)
            raise P2PDaemonError("does not answer")
        return callee

    async def carry(self, sender: Node, receiver: Node, messages: AsyncIterator) -> AsyncIterator:
        """Carry messages over the links while the receiver is busy, as a network does."""
        queue: asyncio.Queue = asyncio.Queue()

        async def pump() -> None:
            end: Exception | None = None
            try:
                async with aclosing(messages):
                    async for message in messages:
                        await self._pass_links(sender, receiver, message)
                        queue.put_nowait((message, self.time.read() + LATENCY))
            except Exception as error:
                end = P2PHandlerError(repr(error))
            finally:
                if sender.ended:
                    end = P2PHandlerError("the stream was reset")
                if not sender.vanished:
                    queue.put_nowait((end, 0.0))

        if (task := sender.create_task(pump())) is None:
            raise P2PHandlerError("the stream was reset")
        try:
            while (found := await queue.get())[0] is not None:
                message, arrives_at = found
                if isinstance(message, Exception):
                    raise message
                await asyncio.sleep(arrives_at - self.time.read())  # others are on their way meanwhile
                yield message
        finally:
            task.cancel()

    async def _pass_links(self, sender: Node, receiver: Node, message: object) -> None:
        size = len(message.tensor_part.buffer) if hasattr(message, "tensor_part") else 0
        sender.bytes_to_send += size
        for end, (peer, rate) in enumerate(((sender, sender.uplink), (receiver, receiver.downlink))):
            now = self.time.read()
            until = peer.links_free_at[end] = max(peer.links_free_at[end], now) + size / rate
            try:
                await asyncio.sleep(until - now)
            except asyncio.CancelledError:  # what is not sent yet is dropped
                dropped = min(size / rate, until - self.time.read())
                peer.links_free_at[end] -= dropped
                sender.bytes_to_send -= 0 if end else dropped * rate
                raise
        while not self.reaches(sender, receiver):
            await asyncio.sleep(0.5)

    # The DHT

    def call_in_loop(self, function: Callable[[], object], seconds: float = 0.0) -> None:
        loop = self.time.loop
        loop.call_soon_threadsafe(partial(loop.call_later, seconds, function))

    def store(self, peer: Node, key: str, subkey: bytes, record: ValueWithExpiration) -> None:
        if not peer.vanished:
            self._keep(self._records[self._side_of(peer)], key, subkey, record)

    def _keep(self, side: dict, key: str, subkey: bytes, record: ValueWithExpiration) -> None:
        records = side.setdefault(key, {})
        if subkey not in records or records[subkey].expiration_time < record.expiration_time:
            records[subkey] = record

    def answer(self, peer: Node, key: str, future: MPFuture) -> None:
        if peer.ended:
            return
        now, records = EPOCH + self.time.read(), self._records[self._side_of(peer)].get(key, {})
        found = {subkey: record for subkey, record in records.items() if record.expiration_time > now}
        with suppress(Exception):  # the asker may have cancelled it
            future.set_result(ValueWithExpiration(found, now) if found else None)
