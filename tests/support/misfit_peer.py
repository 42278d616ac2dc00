"""Peer without a GPU that reports another model than that of the run, until it is killed.

python tests/support/misfit_peer.py RUN_ID MULTIADDRESS
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cotrain.dht.run_records import record_schemas
from peerstep.local_peer import LocalPeer
from peerstep.peer.clock import run_time
from peerstep.peer.node import PROGRESS
from peerstep.reports.progress_report import PeerProgress
from peerstep.reports.records import store_record


def main(run_id: str, address: str) -> None:
    options = {"schemas": record_schemas(run_id), "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalPeer(run_id, Path(folder) / "identity.key", [address], **options) as swarm,
    ):
        while True:
            report = PeerProgress(b"", time=run_time()).to_record() | {"schema": "nobody", "reported_at": run_time()}
            store_record(swarm.dht, f"{run_id}_{PROGRESS}", swarm.public_key, report, 120.0)
            print("attacked the trainers that begin", flush=True)
            time.sleep(5.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
