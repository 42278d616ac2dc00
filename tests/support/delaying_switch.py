#!/usr/bin/env python3
"""A network switch with latency: tests/support/delaying_switch.py MILLISECONDS

Forwards the frames between the interfaces of this network namespace whose names begin with "port", each after a fixed
time. It replaces tc's netem, which some kernels lack. Frames that a full queue of an interface refuses are lost.
"""

import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # <linux/if_packet.h>
ETH_P_ALL = 3
HEADER_BYTES = (
    10  # of struct virtio_net_hdr: with it frames of many segments, and open checksums, are forwarded as such
)
MAX_BYTES = HEADER_BYTES + 14 + 2**16
SCAN_SECONDS = 0.2  # between two looks for new interfaces


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
        port.setsockopt(SOL_PACKET, option, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24)
    port.setblocking(False)
    port.bind((name, ETH_P_ALL))
    return port


def forward(latency: float) -> None:
    ports: dict[str, socket.socket] = {}
    by_address: dict[bytes, socket.socket] = {}  # MAC address -> where its frames come from
    waiting: deque[tuple[float, list[socket.socket], bytes]] = deque()
    next_scan = 0.0
    while True:
        if (now := time.monotonic()) >= next_scan:
            next_scan = now + SCAN_SECONDS
            for _, name in socket.if_nameindex():
                if name.startswith("port") and name not in ports:
                    ports[name] = open_port(name)
        due = min(next_scan, waiting[0][0] if waiting else next_scan)
        readable, _, _ = select.select(ports.values(), (), (), max(0.0, due - now))
        for port in readable:
            with suppress(OSError):
                frame = port.recv(MAX_BYTES)
                target, source = frame[HEADER_BYTES : HEADER_BYTES + 6], frame[HEADER_BYTES + 6 : HEADER_BYTES + 12]
                by_address[source] = port
                targets = (
                    [by_address[target]] if target in by_address else [p for p in ports.values() if p is not port]
                )
                waiting.append((time.monotonic() + latency, targets, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, targets, frame = waiting.popleft()
            for port in targets:
                with suppress(OSError):
                    port.send(frame)


if __name__ == "__main__":
    forward(float(sys.argv[1]) / 1000)
