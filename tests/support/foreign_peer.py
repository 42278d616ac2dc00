"""Trainer with the same run ID that other peers must ignore: plain hivemind, or this project with another protocol.

python tests/support/foreign_peer.py hivemind|protocol RUN_ID MULTIADDRESS
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import hivemind
import torch
from hivemind.dht.crypto import RSASignatureValidator
from transformers import AlbertConfig

from lib.training.model import build_model
from tests.support.fakes import make_batch
from tests.support.peers import LOCAL, TINY_ALBERT, local_optimizer, local_peer

CONFIG = AlbertConfig(vocab_size=1000, **{name: value for name, value in TINY_ALBERT.items() if name != "model_type"})
OTHER_PROTOCOL = 1000


def plain_trainer(model: torch.nn.Module, run_id: str, address: str) -> hivemind.Optimizer:
    """Build the optimizer as in hivemind's README."""
    validators = [RSASignatureValidator()]
    dht = hivemind.DHT(initial_peers=[address], host_maddrs=[LOCAL], record_validators=validators, start=True)
    return hivemind.Optimizer(
        dht=dht,
        run_id=run_id,
        target_batch_size=12,
        batch_size_per_step=4,
        params=model.parameters(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        matchmaking_time=3.1,
        averaging_timeout=10.0,
    )


def trainer_of_another_protocol(stack: ExitStack, model: torch.nn.Module, run_id: str, address: str):
    from lib.averaging import progress, rounds

    rounds.PROTOCOL = progress.PROTOCOL = OTHER_PROTOCOL
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    peer = stack.enter_context(local_peer(folder, run_id, (address,)))
    options = {"run_id": run_id, "target_batch_size": 12, "gradient_compression": "none", "state_compression": "none"}
    return stack.enter_context(local_optimizer(model, peer, 4, **options))


def main(kind: str, run_id: str, address: str) -> None:
    model = build_model(CONFIG, "run")
    with ExitStack() as stack:
        if kind == "hivemind":
            optimizer = plain_trainer(model, run_id, address)
        else:
            optimizer = trainer_of_another_protocol(stack, model, run_id, address)
        while True:
            optimizer.zero_grad()
            model(**make_batch(size=4)).loss.backward()
            optimizer.step()
            print(f"is at step {optimizer.local_epoch}", flush=True)
            time.sleep(0.3)


if __name__ == "__main__":
    main(*sys.argv[1:])
