"""Peer without a GPU that knows one address of a run and attacks it with records alone, until it is killed.

It reports in the name of every trainer that it finds and in its own, withdraws their offers of a state, offers one
itself, and fills the dictionaries of the run with junk.

python tests/support/stranger.py RUN_ID MULTIADDRESS
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hivemind.dht import DHT
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from lib.averaging.records import signer_of
from lib.common.processes import guard_children
from tests.support.hostile_peer import UncheckedSignatures, progress

DAY = 86_000.0
JUNK = 1000  # records under each key: as many as a node keeps


class Stranger:
    def __init__(self, run_id: str, address: str):
        signer = UncheckedSignatures(RSAPrivateKey())
        self.own = signer.local_public_key
        self.dht = DHT([address], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], record_validators=[signer])
        self.reports, self.offers = f"{run_id}_training_progress", f"{run_id}_state_averager.all_averagers"
        self.keys = [self.reports, self.offers, f"{run_id}_metrics", f"{run_id}_peers", "run_config"]
        self.stores = []

    def store(self, key: str, subkey: bytes, value: object, lifetime: float = DAY) -> None:
        expiration = get_dht_time() + lifetime
        self.stores.append(self.dht.store(key, value, expiration, subkey=subkey, return_future=True))

    def fill_dictionaries(self) -> None:
        for key in self.keys:
            for number in range(JUNK):
                self.store(key, b"%d" % number, None)
                self.store(key, b"%d" % number + self.own, None)

    def attack(self) -> int:
        """Write false reports and offers; return the number of trainers found."""
        found = self.dht.get(self.reports, latest=True)
        trainers = [subkey for subkey in (found.value if found else {}) if subkey != self.own]
        for number, trainer in enumerate(trainers):
            peer_id = signer_of(trainer).to_bytes()
            forged = {**progress(epoch=1, when=50.0), "peer_id": peer_id, "auxiliary": True}
            for subkey in (trainer, peer_id, b"x%d" % number + self.own):
                self.store(self.reports, subkey, forged, lifetime=100.0)
                self.store(self.offers, subkey, None)
        self.store(self.reports, self.own, {**progress(epoch=30_000), "samples_accumulated": 64}, lifetime=100.0)
        self.store(self.offers, self.own, 30_000.0, lifetime=100.0)
        return len(trainers)

    def wait(self) -> None:
        for stored in self.stores:
            stored.result(60.0)
        self.stores.clear()


if __name__ == "__main__":
    guard_children()  # its DHT process must end with it
    stranger = Stranger(*sys.argv[1:])
    stranger.fill_dictionaries()
    while True:
        number = stranger.attack()
        stranger.wait()
        print(f"attacked {number} trainers", flush=True)
        time.sleep(0.5)
