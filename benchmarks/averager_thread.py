"""What the rounds of a trainer cost its local steps, if its averager is a thread of the trainer, or a process.

Two members run one all-reduce after the other over libp2p, with a limited upload. One of them is beside the local
steps: without rounds, in a thread with its own event loop, or in a process, in turns. The local steps are many small
operations, which hold Python's global lock between them, and those of a GPT-2 with small batches.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import torch
from hivemind.compression import Float16Compression, RoleAdaptiveCompression, TensorRole
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils.multiaddr import Multiaddr
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).parent.parent))

from peerstep.allreduce import AllReduce, cut_tensors
from peerstep.bounds import Bounds
from peerstep.processes import signal_at_end_of_parent

PART_BYTES = 2**19
ALONE, THREAD, PROCESS = "no rounds", "thread", "process"
COMPRESSION = RoleAdaptiveCompression(gradient=Float16Compression())


class Member(ServicerBase):
    """A member of two that averages gradients again and again, while `may_run` is set.

    :param num_elements: gradients of a round
    :param upload: bytes per second
    """

    def __init__(self, num_elements: int, upload: float, may_run, num_rounds):
        self.gradients, self.upload = [torch.randn(num_elements)], upload
        self.may_run, self.num_rounds = may_run, num_rounds
        self.rounds: dict[bytes, AllReduce] = {}  # the newest one

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        group_id = (await anext(stream)).group_id
        while group_id not in self.rounds:
            await asyncio.sleep(0.01)
        async for message in self.rounds[group_id].reducer.answer(context.remote_id, stream):
            yield message
        await asyncio.sleep(1.0)  # see SafeAverager._keep_stream_open

    async def run(self, pipe: Connection) -> None:
        """Exchange addresses with the other member through `pipe`, and average for ever."""
        p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        await self.add_p2p_handlers(p2p)
        pipe.send((p2p.peer_id.to_bytes(), [str(maddr) for maddr in await p2p.get_visible_maddrs()]))
        other_id, maddrs = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await p2p._client.connect(PeerID(other_id), [Multiaddr(maddr.rsplit("/p2p/", 1)[0]) for maddr in maddrs])
        members = sorted([p2p.peer_id, PeerID(other_id)], key=PeerID.to_bytes)
        number = 0
        while True:
            while not self.may_run.is_set():
                await asyncio.sleep(0.05)
            await self._average(number, p2p, members)
            number += 1
            self.num_rounds.value += 1

    async def _average(self, number: int, p2p: P2P, members: list[PeerID]) -> None:
        parts = cut_tensors(
            COMPRESSION, PART_BYTES, number, TensorRole.GRADIENT, self.gradients, self.gradients, [1, 1], 1.0
        )
        runner = AllReduce(
            peer_id=p2p.peer_id,
            group_id=number.to_bytes(8, "big"),
            parts=dict(zip(members, parts, strict=True)),
            get_stub=partial(self.get_stub, p2p),
            bounds=Bounds(),
            sender_timeout=60.0,
            reducer_timeout=60.0,
            timeout=120.0,
            upload=self.upload,
        )
        runner._upload = self.upload  # also in rounds that are too short to be paced
        self.rounds = {runner.group_id: runner}
        end = time.monotonic() + 2 * len(self.gradients[0]) / self.upload  # half of it for the averages
        await runner.run()
        await asyncio.sleep(end - time.monotonic())


def host(pipe: Connection, *options) -> None:
    """Run a member in a separate process."""
    signal_at_end_of_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    asyncio.run(Member(*options).run(pipe))


def build_small_operations(device: str) -> Callable[[], None]:
    """Return a local step of 2,000 operations on 1,000 numbers."""
    values = torch.randn(1000, device=device)

    def step() -> None:
        result = values
        for _ in range(500):
            result = (result * 1.01).sin().add(values).tanh()
        result.sum().item()

    return step


def build_gpt2(device: str) -> Callable[[], None]:
    """Return a local step of GPT-2, on a CPU of a tiny one, with two samples of 64 tokens."""
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2} if device == "cpu" else {}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).to(device).train()
    tokens = torch.randint(50000, (2, 64), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        loss.item()
        model.zero_grad()

    return step


def measure(step: Callable[[], None], seconds: float) -> float:
    """Return the local steps per second."""
    count, started = 0, time.monotonic()
    while time.monotonic() < started + seconds:
        step()
        count += 1
    return count / (time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="of the local steps")
    parser.add_argument("--elements", type=int, default=8_000_000, help="gradients of a round")
    parser.add_argument("--mbits", type=float, default=100.0, help="upload of each member, Mbit/s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    context, upload = multiprocessing.get_context("spawn"), args.mbits * 125_000
    events = {mode: context.Event() for mode in (THREAD, PROCESS)}
    counts = {mode: context.Value("i", 0) for mode in events}
    unread = context.Value("i", 0)
    for mode, event in events.items():
        near, far = context.Pipe()
        options = args.elements, upload, event
        context.Process(target=host, args=(far, *options, unread), daemon=True).start()
        if mode == PROCESS:
            context.Process(target=host, args=(near, *options, counts[mode]), daemon=True).start()
        else:
            work = Member(*options, counts[mode]).run(near)
            threading.Thread(target=asyncio.run, args=(work,), daemon=True).start()
    if args.device == "cpu":
        torch.set_num_threads(1)
    for name, build in (("many small operations", build_small_operations), ("GPT-2", build_gpt2)):
        step, rates = build(args.device), {mode: [] for mode in (ALONE, *events)}
        measure(step, 3.0)
        for _ in range(args.repeat):
            for mode in random.sample(list(rates), len(rates)):
                if mode in events:
                    before = counts[mode].value
                    events[mode].set()
                    while counts[mode].value == before:
                        time.sleep(0.1)
                rates[mode].append(measure(step, args.seconds))
                if mode in events:
                    events[mode].clear()
                    time.sleep(2 * args.elements / upload + 1.0)  # the round ends
        base = statistics.median(rates[ALONE])
        print(f"{name} on {args.device}, {args.mbits:.0f} Mbit/s, {base:.1f} local steps a second without rounds")
        for mode, of_mode in rates.items():
            values = " ".join(f"{rate / base:.3f}" for rate in sorted(of_mode))
            print(f"  {mode}: {statistics.median(of_mode) / base:.3f} ({values})", flush=True)
    print("rounds:", {mode: count.value for mode, count in counts.items()}, flush=True)
    os._exit(0)  # the thread runs


if __name__ == "__main__":
    main()
