"""The averager of a peer that does not train."""

import asyncio
from contextlib import nullcontext

import torch
from hivemind.proto.averaging_pb2 import DownloadData

from cotrain.settings import Hyperparameters
from cotrain.training import builders
from peerstep.state.digest import Digest, fold
from tests.support.engine import build_model
from tests.support.state import fill_parameters


def test_monitor_compares_with_the_state_that_it_offers(build_swarm, monkeypatch):
    """Its averager's process must see what the monitor has loaded since the process was forked."""
    monkeypatch.setattr(builders, "supervise", lambda *_args, **_options: nullcontext())  # it ends the process
    swarm = build_swarm()
    trainer = swarm.add()
    trainer.optimizer.load_state_from_peers()
    fill_parameters(trainer.optimizer.state_averager, 7.0)
    for values in trainer.optimizer.state_averager.optimizer.state.values():
        values["exp_avg"].fill_(1e-3)
        values["exp_avg_sq"].fill_(1e-4)
    trainer.optimizer.state_averager.offer(priority=1)
    args = Hyperparameters(learning_rate=0.01, warmup_steps=0, total_steps=1000)
    peer, seed = swarm.add_peer(), bytes(8)
    with builders.open_observer(build_model(), peer, "run", args, 60.0) as observer:
        assert observer.load_state_from_peers(min_step=0)
        observer.offer(priority=1)

        async def ask() -> DownloadData:
            p2p = await trainer.optimizer.dht.replicate_p2p()
            stub = type(observer).get_stub(p2p, observer.peer_id, namespace=observer.prefix)
            return await stub.rpc_compare_state(DownloadData(metadata=seed))

        layout = trainer.optimizer.state_averager.layout
        digest = Digest.parse(asyncio.run(ask()), layout.num_groups)
        assert digest.step == 1
        assert torch.allclose(digest.sums, fold(layout.groups(layout.tensors()), seed), rtol=0.01, atol=0.1)
