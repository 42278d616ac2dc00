"""Checks of the other peers: their addresses, their answers, a download, and the time of a round."""

import socket
import time
from dataclasses import replace
from functools import partial

import psutil
import torch
from hivemind.dht import DHT
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID

from cotrain.common.errors import UserError
from cotrain.common.flags import format_size
from cotrain.options import CollaborationOptions, TrainerOptions
from cotrain.status.short_steps import advise_target
from cotrain.training.builders import open_observer
from cotrain.training.finding import Finding
from cotrain.training.round_time import BITS, LINKS, hourly_gigabytes, round_seconds
from peerstep.local_peer import LocalPeer
from peerstep.peer.redial import find_tcp_endpoint
from peerstep.progress.view import View
from peerstep.reports.progress_report import PeerProgress, read_progress
from peerstep.reports.records import get_records
from peerstep.step.pace import SHORT

DIAL_TIMEOUT = 5.0


def check_address(maddr: str) -> Finding:
    """Try to open a TCP connection to an address."""
    try:
        socket.create_connection(find_tcp_endpoint(maddr), timeout=DIAL_TIMEOUT).close()
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(maddr, reason, "Ask for the current address; check that no firewall is in between")
    return Finding(maddr, "the port answers")


def check_peer(dht: DHT, peer_id: PeerID, client_mode: bool) -> str:
    """Ask a peer whether it answers and can dial this peer; UserError if not."""
    fault = dht.run_coroutine(partial(_ping, peer_id=peer_id), return_future=True).result(timeout=60.0)
    if fault is not None:
        raise UserError(fault)
    return f"it answers, {'this peer dials only (--client_mode)' if client_mode else 'it can dial this peer'}"


async def _ping(_dht: DHT, node: DHTNode, peer_id: PeerID) -> str | None:
    """Return what is wrong with a peer, if anything. Runs in the DHT process."""
    try:
        found = await node.protocol.call_ping(peer_id, validate=True)
    except Exception as error:
        return str(error)
    return None if found is not None else "it is no peer of this run: ask for the current address or an --invitation"


def measure_download(model: torch.nn.Module, peer: LocalPeer, args: TrainerOptions) -> str:
    """Download the state of the trainers, and return the speed."""
    timeout = args.collaboration.load_state_timeout
    with open_observer(model, peer, args.collaboration.run_id, args.training, timeout) as averager:
        received, started = psutil.net_io_counters().bytes_recv, time.monotonic()
        found = averager.download_state()
        seconds, received = time.monotonic() - started, psutil.net_io_counters().bytes_recv - received
    if found is None:
        return "no peer offers a trained state: this would be the first trainer"
    _, metadata, _ = found
    speed = f"{8e-6 * received / seconds:,.0f} Mbit/s"
    return f"step #{metadata['epoch']}, {received / 1e6:,.1f} MB in {seconds:.1f} s ({speed})"


def view_run(dht: DHT, args: CollaborationOptions) -> View:
    """Return what the trainers of the run report, for a peer that has none of its rounds."""
    now = time.monotonic()
    reports = read_progress(get_records(dht, f"{args.run_id}_training_progress"))
    others = (replace(report, peer_id=peer.to_bytes(), reported_here=now) for peer, report in reports.items())
    return View(PeerProgress(b""), tuple(others), now, now, args.target_batch_size)


def check_rounds(dht: DHT, num_parameters: int, args: CollaborationOptions) -> Finding:
    """Tell how long a round takes with an upload of --bandwidth, or of some links."""
    bits = BITS[args.gradient_compression] + BITS[args.state_compression]
    view = view_run(dht, args)
    trainers = max(2, min(1 + len(view.present), args.target_group_size))
    peers = 2 if args.client_mode else trainers  # in client mode, it sends each tensor once, as one of two does
    uploads = [args.bandwidth] if args.bandwidth else LINKS
    seconds = [max(1.0, round_seconds(num_parameters, peers, bits, upload)) for upload in uploads]
    times = ", ".join(f"{needed:.0f} s at {upload:g}" for needed, upload in zip(seconds, uploads, strict=True))
    text = f"one of {trainers} trainers with the parameters takes about {times} Mbit/s of upload"
    if (rate := view.samples_per_second) > 0:
        gigabytes = hourly_gigabytes(num_parameters, peers, args, rate / args.target_batch_size)
        text += f"; about {format_size(1e9 * gigabytes)} of traffic an hour at the present speed of the run"
        usual = round_seconds(num_parameters, peers, BITS[args.gradient_compression], uploads[-1])
        share = usual * rate / args.target_batch_size
        text += f"; {advise_target(args.target_batch_size, share)}" if share > SHORT else ""
    if seconds[-1] <= args.averaging_timeout:
        return Finding("rounds", text)
    advice = "Use a faster connection, or ask the organiser for smaller rounds, see docs/tuning.md#local-updates"
    return Finding("rounds", f"{text}, and --averaging_timeout is {args.averaging_timeout:.0f} s", advice)
