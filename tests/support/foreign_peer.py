"""Trainer of plain hivemind with the same run ID, which other peers must ignore.

python tests/support/foreign_peer.py RUN_ID MULTIADDRESS
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import hivemind
import torch
from hivemind.dht.crypto import RSASignatureValidator

from tests.support.engine import LOCAL, build_model, make_batch


def main(run_id: str, address: str) -> None:
    """Train as in hivemind's README."""
    model = build_model()
    validators = [RSASignatureValidator()]
    optimizer = hivemind.Optimizer(
        dht=hivemind.DHT(initial_peers=[address], host_maddrs=[LOCAL], record_validators=validators, start=True),
        run_id=run_id,
        target_batch_size=12,
        batch_size_per_step=4,
        params=model.parameters(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        matchmaking_time=3.1,
        averaging_timeout=10.0,
    )
    while True:
        optimizer.zero_grad()
        model(**make_batch(size=4)).loss.backward()
        optimizer.step()
        print(f"is at step {optimizer.local_epoch}", flush=True)
        time.sleep(0.3)


if __name__ == "__main__":
    main(*sys.argv[1:])
