"""Life cycle of a DHT peer: started in order, supervised, and shut down in reverse order on every path."""

import contextlib
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hivemind.dht import DHT
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils import MPFuture, get_logger
from hivemind.utils.crypto import RSAPrivateKey

from cotrain.admission.admission import InvitedDHT, explain_refusal, load_admission
from cotrain.admission.invitations import load_identity, write_private_key
from cotrain.arguments import BaseTrainingArguments
from cotrain.common.atomic_files import lock_folder, remove_leftovers
from cotrain.common.errors import TEMPORARY, TemporaryError, UserError
from cotrain.common.signals import StopSignal
from cotrain.dht.run_records import make_validators
from cotrain.peer.addresses import peer_id_in
from peerstep.node import SafeDHT, use_own_socket_folder
from peerstep.patches import apply_patches
from peerstep.processes import Watchdog, exit_after, keep_memory_shared, start_shared_memory_manager
from peerstep.records import peer_id_of
from peerstep.redial import BootstrapRedialer, set_run_clock

logger = get_logger(__name__)


@dataclass
class Peer:
    """A running DHT peer and its identity."""

    dht: DHT
    private_key: RSAPrivateKey
    public_key: bytes  # the subkey of its signed records


@contextlib.contextmanager
def open_peer(
    args: BaseTrainingArguments, output_dir: Path, client_mode: bool, stop: StopSignal, is_alone: bool = False
) -> Iterator[Peer]:
    """Run a DHT peer that has joined the other peers and stays connected to them. See `start_peer`.

    :param output_dir: folder of the peer, locked against a second peer
    :raises UserError: if another peer uses the folder, or no peer can be reached
    """
    with lock_folder(output_dir, "--output_dir"):
        remove_leftovers(output_dir)
        stop.defer()
        identity_path = Path(args.identity_path or output_dir / "identity.key")
        if args.initial_peers and not is_alone:
            logger.info(f"Joining the collaboration through {', '.join(args.initial_peers)}")
        peer = start_peer(args, identity_path, client_mode, stop.event, is_alone)
        redialer = BootstrapRedialer(peer.dht, args.initial_peers)
        redialer.start()
        try:
            yield peer
        finally:
            redialer.stop()
            peer.dht.shutdown()


@contextlib.contextmanager
def supervise(
    children: dict[str, multiprocessing.Process], seconds: float, exit_code: int, longest_wait: float = math.inf
) -> Iterator[Watchdog]:
    """End this process if a child dies, if it hangs, or if the shutdown afterwards takes longer than `seconds`.

    :param longest_wait: see Watchdog
    :raises TemporaryError: instead of an error that follows from the death of a child
    """
    watchdog = Watchdog(children, longest_wait)
    watchdog.start()
    try:
        yield watchdog
    except Exception as error:
        fault = watchdog.find_fault()
        if fault is not None or isinstance(error, TemporaryError):
            exit_code = TEMPORARY
        if fault is not None and not isinstance(error, UserError):
            raise TemporaryError(fault) from error
        raise
    finally:
        watchdog.stop()
        exit_after(seconds, exit_code, "hivemind did not shut down in time")


def start_peer(
    args: BaseTrainingArguments,
    identity_path: Path,
    client_mode: bool,
    should_stop: threading.Event,
    is_alone: bool = False,
) -> Peer:
    """Start a DHT peer and join the other peers, with retries for `args.bootstrap_timeout` seconds.

    :param should_stop: ends the retries, with SystemExit
    :param is_alone: start without the other peers, which do not answer
    :raises TemporaryError: if no initial peer can be reached
    :raises UserError: if an address cannot be listened on
    """
    apply_patches()
    start_shared_memory_manager()
    keep_memory_shared()
    use_own_socket_folder(os.getpid())
    build_dht = SafeDHT
    has_new_identity = args.invitation is None and not identity_path.exists()
    if args.invitation is not None:
        admission = load_admission(Path(args.invitation), identity_path.parent)
        identity_path = identity_path.with_name("invited.key")
        write_private_key(admission.invitation.private_key, identity_path)
        name = admission.invitation.token.username
        if (own := getattr(args, "username", "")) not in ("", name):
            raise UserError(f"--username is '{own}', and the invitation is for '{name}': drop --username")
        args.username = name
        build_dht = partial(InvitedDHT, admission=admission)
    private_key = load_identity(identity_path)
    validators, public_key = make_validators(args.run_id, private_key)
    initial_peers = [] if is_alone else args.initial_peers
    deadline, has_warned = time.monotonic() + args.bootstrap_timeout, False
    while True:
        dht = build_dht(
            initial_peers=initial_peers,
            host_maddrs=args.host_maddrs,
            announce_maddrs=args.announce_maddrs or None,
            use_ipfs=args.use_ipfs,
            use_relay=args.use_relay,
            use_auto_relay=args.use_auto_relay,
            trusted_relays=args.trusted_relays or None,
            identity_path=str(identity_path),
            check_if_identity_free=not has_new_identity,  # which takes a second and another p2pd
            client_mode=client_mode,
            no_listen=client_mode,
            nat_port_map=args.map_port and not client_mode,
            record_validators=validators,
            startup_timeout=args.bootstrap_timeout,
            shutdown_timeout=5,
            start=True,
            await_ready=False,
        )
        try:
            _wait_until_ready(dht, deadline, should_stop)
            set_run_clock(dht, initial_peers)
            return Peer(dht, private_key, public_key)
        except Exception as error:
            _end(dht)
            if should_stop.is_set():
                raise SystemExit(0) from None
            dht.check_invitation()
            fault = _explain(error, args, dht.errors.value)
            if not isinstance(fault, TemporaryError) or time.monotonic() + 3 > deadline:
                raise fault from None
            if not has_warned:
                logger.warning(f"{fault}. Trying for {args.bootstrap_timeout:.0f} seconds")
                has_warned = True
            should_stop.wait(3)


def find_own_id(args: BaseTrainingArguments, output_dir: Path) -> PeerID | None:
    """Return the ID of the peer that runs with these arguments; None before its first start."""
    path = Path(args.identity_path or output_dir / ("invited.key" if args.invitation else "identity.key"))
    return peer_id_of(load_identity(path).get_public_key()) if path.exists() else None


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


def _end(dht: DHT) -> None:
    """End a DHT process that did not become ready, so that another one can start."""
    dht.join(2)  # after an error the process ends without a kill
    if dht.is_alive():
        dht.kill()
        dht.join(5)
        # The dead process may still hold hivemind's global MPFuture lock; without a reset the next DHT deadlocks.
        MPFuture.reset_backend()


def _explain(error: Exception, args: BaseTrainingArguments, answers: bytes) -> UserError:
    """Return the error of a failed start: a TemporaryError if a retry may succeed. `answers`: see SafeDHT.errors."""
    text = " ".join(str(error).split())
    if "failed to listen" in text or "address already in use" in text or "cannot assign" in text:
        return UserError(
            f"cannot listen on --host_maddrs {' '.join(args.host_maddrs)}: port in use or not this machine's address"
        )
    if "already taken" in text:
        return TemporaryError(text)
    if isinstance(error, P2PDaemonError) and "bootstrap" not in text:
        return UserError(f"the p2p daemon did not start: {text}")
    said = dict(line.partition(" ")[::2] for line in answers.decode(errors="replace").splitlines())
    reasons = [
        explain_refusal(said.get(peer_id_in(m).to_base58(), ""), bool(args.invitation)) for m in args.initial_peers
    ]
    if reasons and all(reasons):  # one of several may lie
        return UserError(f"--initial_peers {' '.join(args.initial_peers)} refuses this peer: {reasons[0]}")
    if not args.initial_peers:
        return TemporaryError(f"no peer was ready after --bootstrap_timeout {args.bootstrap_timeout:.0f}; raise it")
    return TemporaryError(
        f"none of --initial_peers answers: {' '.join(args.initial_peers)}. Check that they run, that the address and "
        f"peer ID are the ones they print now, and that no firewall is in between"
    )
