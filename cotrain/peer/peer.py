"""This peer of a run, from the flags: its folder, identity and invitation, and the retries of its start."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hivemind.dht.schema import SchemaValidator
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from cotrain.admission.admission import Admission, InvitedDHT, explain_refusal
from cotrain.admission.invitations import load_identity, load_invitation
from cotrain.common.atomic_files import lock_folder, remove_leftovers
from cotrain.common.errors import TemporaryError, UserError
from cotrain.common.signals import StopSignal
from cotrain.options import PeerOptions
from cotrain.peer.addresses import await_ports, peer_id_in
from peerstep.errors import PeerError
from peerstep.local_peer import LocalPeer, write_private_key
from peerstep.peer.node import SafeDHT
from peerstep.reports.records import peer_id_of

logger = get_logger(__name__)

START_RETRY_SECONDS = 3.0
WORD_SECONDS = 10.0  # between two lines about peers that do not answer


@contextlib.contextmanager
def open_peer(
    args: PeerOptions,
    schemas: Sequence[SchemaValidator],
    output_dir: Path,
    client_mode: bool,
    stop: StopSignal,
    is_alone: bool = False,
) -> Iterator[LocalPeer]:
    """Run a peer that has joined the others and stays connected to them. See `start_peer`.

    :param schemas: of the records of the scripts, see utils.py
    :param output_dir: folder of the peer, locked against a second peer
    :raises UserError: if another peer uses the folder, or no peer can be reached
    """
    with lock_folder(output_dir, "--output_dir"):
        remove_leftovers(output_dir)
        stop.defer()
        if args.initial_peers and not is_alone:
            logger.info(f"Joining the collaboration through {', '.join(args.initial_peers)}")
        identity_path = Path(args.identity_path or output_dir / "identity.key")
        with start_peer(args, schemas, identity_path, client_mode, stop.event, is_alone) as peer:
            yield peer


def start_peer(
    args: PeerOptions,
    schemas: Sequence[SchemaValidator],
    identity_path: Path,
    client_mode: bool,
    should_stop: threading.Event,
    is_alone: bool = False,
) -> LocalPeer:
    """Start a peer and join the others, with retries for `args.bootstrap_timeout` seconds.

    :param should_stop: ends the retries, with SystemExit
    :param is_alone: start without the other peers, which do not answer
    :raises TemporaryError: if no initial peer can be reached
    :raises UserError: if an address cannot be listened on, or the run refuses this peer
    """
    node_class, options = SafeDHT, {}
    if args.invitation is not None:
        admission = Admission(load_invitation(Path(args.invitation)), identity_path.with_name("revocations"))
        identity_path = identity_path.with_name("invited.key")
        write_private_key(admission.invitation.private_key, identity_path)
        name = admission.invitation.token.username
        if (own := getattr(args, "username", "")) not in ("", name):
            raise UserError(f"--username is '{own}', and the invitation is for '{name}': drop --username")
        args.username = name
        node_class, options = InvitedDHT, {"admission": admission}
    if not client_mode:
        await_ports(args.host_maddrs)
    deadline, warn_at = time.monotonic() + args.bootstrap_timeout, 0.0
    while True:
        try:
            return LocalPeer(
                args.run_id,
                identity_path,
                args.initial_peers,
                is_first=is_alone,
                client_mode=client_mode,
                startup_timeout=max(START_RETRY_SECONDS, deadline - time.monotonic()),
                schemas=schemas,
                should_stop=should_stop,
                node_class=node_class,
                host_maddrs=args.host_maddrs,
                announce_maddrs=args.announce_maddrs or None,
                use_ipfs=args.use_ipfs,
                use_relay=args.use_relay,
                use_auto_relay=args.use_auto_relay,
                trusted_relays=args.trusted_relays or None,
                nat_port_map=args.map_port and not client_mode,
                **options,
            )
        except PeerError as error:
            fault = _explain(error, args)
            if not fault.retryable or time.monotonic() + START_RETRY_SECONDS > deadline:
                raise fault from None
            if (now := time.monotonic()) >= warn_at:
                warn_at = now + WORD_SECONDS
                logger.warning(f"{fault}. Trying for {deadline - now:.0f} seconds more")
            if should_stop.wait(START_RETRY_SECONDS):
                raise SystemExit(0) from None


def find_own_id(args: PeerOptions, output_dir: Path) -> PeerID | None:
    """Return the ID of the peer that runs with these arguments; None before its first start."""
    path = Path(args.identity_path or output_dir / ("invited.key" if args.invitation else "identity.key"))
    return peer_id_of(load_identity(path).get_public_key()) if path.exists() else None


def _explain(error: PeerError, args: PeerOptions) -> UserError:
    """Return the error of a failed start with the flags of the scripts."""
    reasons = [
        explain_refusal(error.answers.get(peer_id_in(maddr).to_base58(), ""), bool(args.invitation))
        for maddr in args.initial_peers
    ]
    if error.answers and all(reasons):  # one of several may lie
        return UserError(f"--initial_peers {' '.join(args.initial_peers)} refuses this peer: {reasons[0]}")
    text = str(error).replace("startup_timeout", "bootstrap_timeout")
    text = re.sub(r"\b(identity_path|host_maddrs|initial_peers|bootstrap_timeout)\b", r"--\1", text)
    return (TemporaryError if error.retryable else UserError)(text)
