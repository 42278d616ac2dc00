"""This peer's node in the DHT of a run: its start, its identity, and what ends the process when a child dies."""

import contextlib
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from hivemind.dht import DHT
from hivemind.dht.schema import SchemaValidator
from hivemind.p2p import P2PDaemonError
from hivemind.proto import crypto_pb2
from hivemind.utils import MPFuture
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.errors import PeerError
from peerstep.patches import apply_patches
from peerstep.peer.node import SafeDHT, use_own_socket_folder
from peerstep.peer.processes import (
    EXIT_TEMPORARY,
    Watchdog,
    exit_after,
    guard_children,
    keep_memory_shared,
    raise_file_limit,
    start_shared_memory_manager,
    stop_requested,
)
from peerstep.peer.redial import BootstrapRedialer, set_run_clock
from peerstep.reports.records import build_validators


class LocalPeer:
    """The run as this peer reaches it. Build it in the main thread; it is a context manager.

    The node joins through any of `initial_peers`, stays connected to them, and takes the run's clock from them. Its
    child processes end with this process.

    :param run_id: name of the run, the same at all its peers
    :param identity_path: file of the peer's private key; written if there is none. The same key is the same peer
    :param initial_peers: multiaddresses, with peer IDs, of peers that run already; none for the first peer
    :param is_first: start although none of `initial_peers` answers; they are dialed later all the same
    :param client_mode: accept no connections, as behind a firewall: the peer calls the others, and none calls it
    :param startup_timeout: seconds in which libp2p's daemon must start and one of `initial_peers` must answer
    :param schemas: SchemaValidators of the caller's own records. Nodes refuse records under other keys
    :param should_stop: ends a start that waits, with SystemExit
    :param node_class: SafeDHT, or a subclass that restricts who may call
    :param options: of hivemind.DHT: `host_maddrs`, `announce_maddrs`, `use_relay`, ...
    :raises PeerError: if the file is no key, an address cannot be listened on (not retryable), or no peer answers
    """

    def __init__(
        self,
        run_id: str,
        identity_path: str | Path,
        initial_peers: Sequence[str] = (),
        *,
        is_first: bool = False,
        client_mode: bool = False,
        startup_timeout: float = 60.0,
        schemas: Sequence[SchemaValidator] = (),
        should_stop: threading.Event | None = None,
        node_class: type[SafeDHT] = SafeDHT,
        **options,
    ):
        apply_patches()
        raise_file_limit()
        guard_children()
        start_shared_memory_manager()
        keep_memory_shared()
        use_own_socket_folder(os.getpid())
        self.run_id, has_new_identity = run_id, not Path(identity_path).exists()
        self.private_key = load_identity(Path(identity_path))
        validators, self.public_key = build_validators(run_id, self.private_key, schemas)
        first_peers = [] if is_first else list(initial_peers)
        self.dht = node_class(
            initial_peers=first_peers,
            identity_path=str(identity_path),
            check_if_identity_free=not has_new_identity,  # which takes a second and another p2pd
            client_mode=client_mode,
            no_listen=client_mode,
            record_validators=validators,
            startup_timeout=startup_timeout,
            shutdown_timeout=5,
            start=True,
            await_ready=False,
            **options,
        )
        should_stop = should_stop or threading.Event()
        try:
            _wait_until_ready(self.dht, time.monotonic() + startup_timeout, should_stop)
            set_run_clock(self.dht, first_peers)
        except Exception as error:
            end_dht(self.dht)
            if should_stop.is_set():
                raise SystemExit(0) from None
            self.dht.check_invitation()
            raise _explain(error, first_peers, options.get("host_maddrs", ()), self.dht.errors.value) from None
        self._redialer = BootstrapRedialer(self.dht, initial_peers)
        self._redialer.start()

    def close(self) -> None:
        """Leave the run. Shut down an optimizer first."""
        self._redialer.stop()
        self.dht.shutdown()

    def __enter__(self) -> "LocalPeer":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@contextlib.contextmanager
def supervise(
    children: dict[str, multiprocessing.Process], seconds: float, exit_code: int, longest_wait: float = math.inf
) -> Iterator[Watchdog]:
    """End this process if a child dies, if it hangs, or if the shutdown afterwards takes longer than `seconds`.

    :param exit_code: of a shutdown that takes too long; EXIT_TEMPORARY after a fault and a retryable PeerError
    :param longest_wait: see Watchdog
    :raises PeerError: retryable, instead of an error that follows from the death of a child
    """
    watchdog = Watchdog(children, longest_wait)
    watchdog.start()
    try:
        yield watchdog
    except Exception as error:
        fault = watchdog.find_fault()
        if fault is not None and stop_requested.is_set():
            raise SystemExit(0) from error
        if fault is not None or getattr(error, "retryable", False):
            exit_code = EXIT_TEMPORARY
        if fault is not None and not isinstance(error, PeerError):
            raise PeerError(fault, retryable=True) from error
        raise
    finally:
        watchdog.stop()
        exit_after(seconds, exit_code, "hivemind did not shut down in time")


def load_identity(path: Path) -> RSAPrivateKey:
    """Read a peer's private key, in libp2p's format, or create it if there is none.

    The key determines the peer ID and signs the peer's records, so that a restarted peer keeps its identity.

    :raises PeerError: if the file is not a private key
    """
    if not path.exists():
        write_private_key(RSAPrivateKey(), path)
    content = path.read_bytes() if path.is_file() else b""
    try:
        return to_private_key(crypto_pb2.PrivateKey.FromString(content).data)
    except Exception:  # protobuf and cryptography raise various exceptions
        fault = f"'{path}' is not a peer's private key; remove the file (a new key is written) or pass another"
        raise PeerError(f"identity_path: {fault}") from None


def to_private_key(der: bytes) -> RSAPrivateKey:
    """Read an RSA key in the DER format; raises for other bytes."""
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key._private_key = serialization.load_der_private_key(der, password=None)
    key.get_public_key().to_bytes()  # raises for other kinds of keys
    return key


def write_private_key(key: RSAPrivateKey, path: Path) -> None:
    """Write a private key in libp2p's format, atomically, readable only by the owner of the file."""
    content = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=key.to_bytes()).SerializeToString()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _wait_until_ready(dht: DHT, deadline: float, should_stop: threading.Event) -> None:
    """Wait for the DHT process; raise TimeoutError at the deadline or if `should_stop` is set."""
    while True:
        try:
            return dht.wait_until_ready(timeout=0.5)
        except TimeoutError:
            if should_stop.is_set() or time.monotonic() > deadline:
                raise
            if not dht.is_alive():
                raise RuntimeError("the DHT process ended before it was ready") from None


def end_dht(dht: DHT) -> None:
    """End a DHT process that did not become ready, so that another one can start."""
    dht.join(2)  # after an error the process ends without a kill
    if dht.is_alive():
        dht.kill()
        dht.join(5)
        # The dead process may still hold hivemind's global MPFuture lock; without a reset the next DHT deadlocks.
        MPFuture.reset_backend()


def _explain(error: Exception, initial_peers: Sequence[str], host_maddrs: Sequence[str], errors: bytes) -> PeerError:
    """Return the error of a failed start. `errors`: see SafeDHT."""
    text = " ".join(str(error).split())
    if "failed to listen" in text or "address already in use" in text or "cannot assign" in text:
        where = " ".join(host_maddrs)
        return PeerError(f"cannot listen on host_maddrs {where}: port in use or not this machine's address")
    if "already taken" in text:
        return PeerError(text, retryable=True)
    if isinstance(error, P2PDaemonError) and "bootstrap" not in text:
        return PeerError(f"the p2p daemon did not start: {text}")
    if not initial_peers:
        return PeerError("no peer was ready in time; raise startup_timeout", retryable=True)
    return PeerError(
        f"none of initial_peers answers: {' '.join(initial_peers)}. Check that they run, that the address and peer ID "
        "are the ones they print now, and that no firewall is in between",
        retryable=True,
        answers={line.split(" ")[0]: line.partition(" ")[2] for line in errors.decode(errors="replace").splitlines()},
    )
