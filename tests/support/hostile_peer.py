"""DHT node without our validators that writes invalid records repeatedly, until it is killed.

python tests/support/hostile_peer.py RUN_ID MULTIADDRESS [NUMBER_OF_FAKE_PEERS]
"""

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from lib.averaging.rounds import PROTOCOL
from lib.common.processes import guard_children

# The claimed steps are far above those of the tests' runs, so that tests can tell them from the trainers' reports.
GOOD = {"step": 30_000, "samples_per_second": 1.5, "samples_accumulated": 64, "loss": 12.5, "mini_steps": 2}
NAN, INFINITY = float("nan"), float("inf")
METRICS = [
    {**GOOD, "step": 10**18}, {**GOOD, "step": 2**31 - 1}, {**GOOD, "step": 10**6}, {**GOOD, "step": -1},
    {**GOOD, "loss": NAN}, {**GOOD, "loss": INFINITY}, {**GOOD, "loss": 1e300},
    {**GOOD, "samples_accumulated": 10**15},
    {**GOOD, "samples_per_second": -1.0}, {"step": 1}, {**GOOD, "extra": 0}, [1, 2], "text", None, b"\xc1", 10**9,
    {**GOOD, "step": True}, {**GOOD, "mini_steps": 0, "samples_accumulated": 0},
]  # fmt: skip


def nest(levels: int, extension: bool = False) -> bytes:
    """Return msgpack of nested lists, or of the nested extension type that hivemind packs tuples into."""
    packed = b"\x90"
    for _ in range(levels):
        packed = b"\x91" + (b"\xc9" + len(packed).to_bytes(4, "big") + b"\x40" if extension else b"") + packed
    return packed


# Bytes that make hivemind's readers raise: no msgpack, truncated, an extension type that raises, nested values
RAW = [b"\xc1", b"", b"\x92\x01", b"\xc7\x01\x50\xc0", nest(400), nest(400, extension=True)]
KEYS_OF_AVERAGERS = [
    f"{averager}.{name}" for averager in ("round_averager", "state_averager") for name in ("0b", "all_averagers")
]


class RawValues(RecordValidatorBase):
    """Stores the bytes of a value {"raw": bytes} unpacked; `DHT.store` always packs values."""

    def validate(self, record: DHTRecord) -> bool:
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        value = MSGPackSerializer.loads(record.value)
        return value["raw"] if isinstance(value, dict) and "raw" in value else record.value


class UncheckedSignatures(RSASignatureValidator):
    """Signs this peer's records, and checks nobody's: hivemind's validator would refuse to send the forged ones."""

    def validate(self, record: DHTRecord) -> bool:
        return True


def progress(epoch: int, rate: float = 1.0, when: float = 0.0, client_mode: bool = False) -> dict:
    """Build a progress report.

    :param when: its time, in seconds from now
    """
    return {
        "protocol": PROTOCOL, "epoch": epoch, "completed": epoch,
        "samples_accumulated": 0, "contributed": 0, "samples_per_second": rate, "time": get_dht_time() + when,
        "reported_at": get_dht_time() + when, "client_mode": client_mode, "auxiliary": False,
    }  # fmt: skip


def main(run_id: str, address: str, num_fakes: int) -> None:
    signer = UncheckedSignatures(RSAPrivateKey())  # of records under `own`; all others remain unsigned
    # It never reads: when a record is refused, hivemind reads it again, which never ends with the bytes in RAW.
    dht = DHT(
        [address], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], record_validators=[RawValues(), signer],
        cache_on_store=False, cache_refresh_before_expiry=0,
    )  # fmt: skip
    own = signer.local_public_key
    victim = RSASignatureValidator(RSAPrivateKey()).local_public_key
    print("hostile peer is up", flush=True)
    generator = random.Random(0)

    def store(name: str, value, subkey=own, lifetime: float = 60.0) -> None:
        try:
            stored = dht.store(name, value, get_dht_time() + lifetime, subkey=subkey, return_future=True)
            stored.result(timeout=10.0)
        except Exception as error:
            print(f"{name}: {error!r}", flush=True)

    while True:
        for value in METRICS:
            for subkey in (own, victim, b"plain", "text", 7, b"[owner:ssh-rsa garbage]"):
                store(f"{run_id}_metrics", value, subkey)
        store(f"{run_id}_metrics", GOOD, own, lifetime=-10)
        store(f"{run_id}_metrics", GOOD, own, lifetime=10**8)
        for value in (
            [[10**9, 1.0, 1, 1.0, 1]] * 64,
            [[NAN] * 5],
            [[1, 2]],
            "x" * 12_000,
            [[0] * 5] * 1000,
            {"a": 1},
        ):
            store(f"{run_id}_history", value)
        for epoch in (10**18, 2**31, 10**6, 30_000):
            for rate in (1.0, NAN, INFINITY, 1e30):
                store(f"{run_id}_training_progress", progress(epoch, rate))
        store(f"{run_id}_training_progress", progress(10**6, 1.0, when=10**6))
        store(f"{run_id}_monitor", {"stores_checkpoints": True, "checkpoint_step": 10**19})
        store(f"{run_id}_peers", {"username": "\x1b[31m" + "x" * 10_000, "leaving": True})
        for value in (INFINITY, NAN, 1e308, 10**6, -1, "text", None):
            store(f"{run_id}_state_averager.all_averagers", value, dht.peer_id.to_bytes())
            store(f"{run_id}_state_averager.all_averagers", value, generator.randbytes(20))
        fakes = [b"[owner:ssh-rsa " + generator.randbytes(20).hex().encode() + b"]" for _ in range(num_fakes)]
        for subkey in fakes:
            dht.store(f"{run_id}_metrics", GOOD, get_dht_time() + 60, subkey=subkey, return_future=True)
        # Until here one of the plausible claims above was in force; from here on the monitor has a report to refuse.
        store(f"{run_id}_training_progress", progress(10**18))
        for name in (*KEYS_OF_AVERAGERS, "training_progress", "metrics", "peers"):
            for raw in RAW:
                store(f"{run_id}_{name}", {"raw": raw}, dht.peer_id.to_bytes(), lifetime=3600.0)
                store(f"{run_id}_{name}", {"raw": raw}, own, lifetime=3600.0)
            store(f"{run_id}_{name}", True, subkey=None, lifetime=3600.0)
        print("one lap of hostile records", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    guard_children()  # its DHT process must end with it
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)
