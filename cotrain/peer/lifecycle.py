"""Life cycle of a peer: started in order, supervised, and shut down in reverse order on every path."""

import contextlib
import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

from cotrain.arguments import BaseTrainingArguments
from cotrain.common.atomic_files import lock_folder, remove_leftovers
from cotrain.common.errors import TEMPORARY, TemporaryError, UserError
from cotrain.common.processes import StopSignal, Watchdog, exit_after
from cotrain.peer.peer import Peer, start_peer
from cotrain.peer.redial import BootstrapRedialer
from cotrain.peer.tunnel import open_tunnel


@contextlib.contextmanager
def open_peer(
    args: BaseTrainingArguments, output_dir: Path, client_mode: bool, stop: StopSignal, may_start_alone: bool = False
) -> Iterator[Peer]:
    """Run a DHT peer that has joined the other peers and stays connected to them. See `start_peer`.

    :param output_dir: folder of the peer, locked against a second peer
    :raises UserError: if another peer uses the folder, or no peer can be reached
    """
    with lock_folder(output_dir, "--output_dir"), open_tunnel(args):
        remove_leftovers(output_dir)
        stop.defer()
        identity_path = Path(args.identity_path or output_dir / "identity.key")
        peer = start_peer(args, identity_path, client_mode, stop.event, may_start_alone)
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
