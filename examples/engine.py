"""Peers that train one small model together with the package peerstep alone, without the scripts of this repository.

    python examples/engine.py one.key                     # prints an address; ends after 200 steps, in some minutes
    python examples/engine.py two.key /ip4/127.0.0.1/...  # in another terminal, with that address

Each peer needs another key file. After each step it prints what came of it, and how many samples were its own.
"""

import sys

import torch

from peerstep import CollaborativeOptimizer, LocalPeer, Options

model = torch.nn.Linear(20, 1)
truth = torch.arange(20.0).unsqueeze(1)

with LocalPeer("engine-example", sys.argv[1], initial_peers=sys.argv[2:]) as peer:
    optimizer = CollaborativeOptimizer(
        model.parameters(),
        lambda groups: torch.optim.AdamW(groups, lr=0.1),
        peer,
        Options(target_batch_size=65_536, batch_size_per_step=32),
    )
    optimizer.load_state_from_peers()
    print("join with", *peer.dht.get_visible_maddrs(), flush=True)
    while optimizer.local_epoch < 200:
        samples = torch.randn(32, 20)
        loss = torch.nn.functional.mse_loss(model(samples), samples @ truth)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for record in optimizer.pop_records():
            print(f"step {record.step}: {record.outcome.value}, {record.samples} samples, loss {loss:.3f}", flush=True)
    optimizer.shutdown()
