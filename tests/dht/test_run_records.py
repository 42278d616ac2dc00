"""Records and their validators, identities and addresses."""

import asyncio
import dataclasses
import multiprocessing
import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
import requests
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from hivemind.utils.multiaddr import Multiaddr

from arguments import BaseTrainingArguments
from cotrain.admission.invitations import load_identity
from cotrain.common.errors import UserError
from cotrain.dht.run_records import HISTORY_LENGTH, TrainerRecord
from cotrain.peer.addresses import announce_public_ip, choose_maddrs, fix_tcp_port, get_free_port
from peerstep.peer.clock import run_time
from peerstep.peer.node import NUM_BUCKETS, DHTProtocol, bucket_of
from peerstep.peer.redial import dial_all, find_tcp_endpoint
from peerstep.reports.records import RunValidator, get_dictionary, signer_of, store_record
from tests.support.dht_records import make_validators, trainer_record
from tests.support.hostile_peer import RAW, nest
from tests.support.peers import local_peer

GOOD = {"step": 3, "samples_per_second": 1.5, "samples_accumulated": 64, "loss": 12.5, "mini_steps": 2}
KEY = RSAPrivateKey()
REPORT = "training_progress"  # stands for the key of it under which the signer's report is
FULL_HISTORY = [[2**31 - 1, 123.456789, 10**9, 123.456789, 10**9]] * HISTORY_LENGTH
COUNTS = {"rounds": 64, "complete": 64, "computed": 10**9, "applied": 10**9, "averaging": 0.123456789}
COUNTS["members"] = [f"{number:07d}" for number in range(32)]
LARGEST = trainer_record(*FULL_HISTORY, username="\U0001f600" * 64, **COUNTS)


def is_accepted(name: str, value, subkey: bytes | None = None, signer: RSAPrivateKey = KEY, lifetime: float = 60):
    """Whether a node of the run would store a record signed by `signer`."""
    validators, own_subkey = make_validators("run", signer)
    record = make_record(name, own_subkey if subkey is None else subkey, MSGPackSerializer.dumps(value), lifetime)
    return is_valid(CompositeValidator(validators), record)


def make_record(name: str, subkey: bytes, value: bytes, lifetime: float = 60) -> DHTRecord:
    if name == REPORT:  # the same name in the tests' IDs, whatever the key is
        name = f"{REPORT}.{bucket_of(RSASignatureValidator(KEY).local_public_key)}"
    key = DHTID.generate(f"run_{name}").to_bytes()
    return DHTRecord(key, MSGPackSerializer.dumps(subkey), value, get_dht_time() + lifetime)


def is_valid(validator: RecordValidatorBase, record: DHTRecord) -> bool:
    """Sign a record and validate it."""
    return validator.validate(dataclasses.replace(record, value=validator.sign_value(record)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metrics", GOOD),
        ("metrics", {**GOOD, "mini_steps": 0, "loss": 0.0}),
        ("metrics", {**GOOD, "metric of a newer peer": 0.5}),
        ("trainers", trainer_record()),
        ("trainers", trainer_record(list(GOOD.values()))),
        ("trainers", trainer_record([*GOOD.values(), 0.5, None])),
        ("trainers", LARGEST),
        ("monitor", {"stores_checkpoints": True, "checkpoint_step": -1}),
        ("trainers", {**trainer_record(), "field of another version": 4096}),
        ("trainers", TrainerRecord(**trainer_record(rounds=64, complete=2, averaging=None)).dict()),
        ("trainers", trainer_record(rounds=64, complete=2, computed=10**9, applied=0)),
        (REPORT, {"protocol": 2, "epoch": 3}),
        (REPORT, None),
        *(("state_averager.all_averagers", value) for value in (12.0, 12, None)),
    ],
)
def test_good_records_are_accepted(name, value):
    assert is_accepted(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("metrics", {**GOOD, "step": step}) for step in (-1, 10**18, 3.0, True)),
        *(("metrics", {**GOOD, "loss": loss}) for loss in (float("nan"), float("inf"), 12)),
        ("metrics", {**GOOD, "samples_per_second": -1.0}),
        ("metrics", {**GOOD, "samples_accumulated": 10**12}),
        *(("metrics", {**GOOD, "extra": extra}) for extra in ("text", float("nan"))),
        ("metrics", {**GOOD, **{f"extra {number}": 1 for number in range(100)}}),
        ("metrics", {**GOOD, 7: 1}),
        ("metrics", {"step": 3}),
        ("metrics", None),
        ("trainers", trainer_record(*FULL_HISTORY, FULL_HISTORY[0])),
        *(("trainers", trainer_record([*GOOD.values(), *more])) for more in (["text"], range(100))),
        *(("trainers", trainer_record(row)) for row in ([1, 2, 3], [None, *list(GOOD.values())[1:]])),
        ("monitor", {"stores_checkpoints": 1, "checkpoint_step": 3}),
        ("trainers", trainer_record(username="x" * 65)),
        ("trainers", trainer_record(username=b"x")),
        *(("trainers", trainer_record(members=names)) for names in (["x" * 8], [b"x"], ["x"] * 33, "x", {"x": 1})),
        ("trainers", trainer_record(leaving=1)),
        ("trainers", trainer_record(rounds=65)),
        ("trainers", trainer_record(rounds=3, complete=-1)),
        ("trainers", {"username": "", "leaving": False, "history": []}),
        ("trainers", trainer_record(computed=10**9 + 1)),
        ("trainers", trainer_record(averaging=1.5)),
        ("trainers", trainer_record(extra="text")),
        ("history", []),
        *((REPORT, value) for value in (True, [1])),
        *(("state_averager.all_averagers", value) for value in (True, float("inf"), -1, [1])),
    ],
)
def test_malformed_records_are_refused(name, value):
    assert not is_accepted(name, value)


def test_records_of_others_are_refused():
    other = RSASignatureValidator(RSAPrivateKey()).local_public_key
    assert not is_accepted("metrics", GOOD, subkey=other), "signed by us in the name of another"
    for name in ("metrics", "state_averager.all_averagers"):
        value = {"metrics": GOOD}.get(name, 12)
        assert not is_accepted(name, value, subkey=b"plain"), "not signed"
        assert not is_accepted(name, value, subkey=b"[owner:ssh-rsa garbage]"), "no public key"
        own = RSASignatureValidator(KEY).local_public_key
        for subkey in (b"2" + own, own + b"2"):
            assert not is_accepted(name, value, subkey=subkey), "another record of the same signer"
    with pytest.raises(ValueError, match="usual form"):
        signer_of(own.replace(b"]", b" comment]"))


def test_large_long_lived_and_unknown_records_are_refused():
    assert is_accepted(REPORT, {"a field of another version": "x" * 1000})
    assert not is_accepted(REPORT, {"a field of another version": "x" * 9000})
    assert not is_accepted(REPORT, {"a field of another version": "x" * 1100}), "a report has some 400 bytes"
    for lifetime in (86400, float("nan"), float("inf")):
        assert not is_accepted("metrics", GOOD, lifetime=lifetime)
    assert is_accepted("metrics", GOOD, lifetime=600) and not is_accepted(REPORT, None, lifetime=600)
    for lifetime in (60.0, -float("inf")):
        assert not is_accepted("anything", None, lifetime=lifetime), "20,000 records under any keys took 92 MB"


def test_report_is_under_one_key():
    """285 signers with a record of 4 KB under each key made all answers too large for a message."""
    assert [is_accepted(f"training_progress.{bucket}", {"protocol": 5}) for bucket in range(NUM_BUCKETS)].count(
        True
    ) == 1


def test_signers_have_a_key_of_the_usual_kind(monkeypatch):
    """An RSA key of 3072 bits with an exponent as long took 43 times as long to refuse a record."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=3072)
    numbers = key.public_key().public_numbers()
    monkeypatch.setattr(RSAPublicKey, "verify", lambda *_: pytest.fail("the signature is not looked at"))
    validators, _ = make_validators("run", KEY)
    for exponent in (numbers.e, numbers.n - 2):
        odd = RSAPublicKey(rsa.RSAPublicNumbers(exponent, numbers.n).public_key())
        subkey = RSASignatureValidator.PUBLIC_KEY_FORMAT.replace(b"_key_", odd.to_bytes())
        record = make_record("metrics", subkey, MSGPackSerializer.dumps(GOOD) + b"[signature:eA==]")
        assert not CompositeValidator(validators).validate(record)


def test_refused_record_does_not_cost_the_answer_that_it_is_in():
    (validator,), own_subkey = make_validators("run", KEY)
    good = make_record("metrics", own_subkey, MSGPackSerializer.dumps(GOOD))
    answer, protocol = DictionaryDHTValue(), DHTProtocol.__new__(DHTProtocol)
    protocol.record_validator = validator
    answer.store(own_subkey, validator.sign_value(good), good.expiration_time)
    answer.store(b"junk", b"junk", good.expiration_time)
    answer.maxsize = "no number"
    assert protocol._validate_dictionary(good.key, answer)
    assert [subkey for subkey, _ in answer.items()] == [own_subkey]


def test_largest_dictionary_fits_into_one_answer():
    dictionary = DictionaryDHTValue(maxsize=10_000)
    for number in range(RunValidator.MAX_SUBKEYS):
        subkey = MSGPackSerializer.dumps(number.to_bytes(400, "big"))
        value = b"x" * (RunValidator.MAX_BYTES - len(subkey) + RunValidator.MAX_SIGNATURE_BYTES)
        assert dictionary.store(number.to_bytes(400, "big"), value, get_dht_time() + 1000)
    assert len(KEY.sign(b"record")) + len(RSASignatureValidator.SIGNATURE_FORMAT) < RunValidator.MAX_SIGNATURE_BYTES
    assert len(MSGPackSerializer.dumps(dictionary)) < DEFAULT_MAX_MSG_SIZE - 10_000


def test_more_signers_than_a_run_has_peers_are_refused(monkeypatch):
    now = get_dht_time()
    monkeypatch.setattr("peerstep.reports.records.run_time", lambda: now)
    monkeypatch.setattr(RunValidator, "MAX_SUBKEYS", 3)
    validator = RunValidator([], dict.fromkeys((b"key", b"another key"), 100.0))
    signers = [MSGPackSerializer.dumps(make_validators("run", RSAPrivateKey())[1]) for _ in range(4)]

    def store(signer: int, lifetime: float = 60.0, key: bytes = b"key") -> bool:
        return validator.validate(DHTRecord(key, signers[signer], b"\xc0", now + lifetime))

    assert store(0) and store(1) and store(2, lifetime=0.2)
    assert not store(3), "a fourth"
    assert store(1, lifetime=61.0), "a known one"
    assert store(3, key=b"another key")
    now += 0.3
    assert store(3), "there is room once another has expired"


def test_signer_has_one_place(monkeypatch):
    """The length of the same bytes may have 8, 16 or 32 bits in msgpack."""
    (validator,), own = make_validators("run", KEY)
    packed = MSGPackSerializer.dumps(own)
    forms = [packed, b"\xc6" + len(own).to_bytes(4, "big") + own]
    assert [MSGPackSerializer.loads(form) for form in forms] == [own, own] and packed != forms[1]
    records = [
        dataclasses.replace(make_record("metrics", own, MSGPackSerializer.dumps(GOOD)), subkey=form) for form in forms
    ]
    assert [is_valid(validator, record) for record in records] == [True, False]


@pytest.mark.parametrize("keys", [[b"a"] * 2, [b"%d" % number for number in range(100)]], ids=["repeated", "many"])
async def test_requests_with_repeated_or_many_keys_are_refused(keys):
    """Each repetition was answered with the whole dictionary: a request of 4 MiB filled the memory."""
    protocol = DHTProtocol.__new__(DHTProtocol)
    protocol.node_info, protocol.bucket_size = dht_pb2.NodeInfo(), 20
    protocol.rpc_ping, protocol.storage, protocol.cache = AsyncMock(), DHTLocalStorage(), DHTLocalStorage()
    protocol.routing_table = SimpleNamespace(get_nearest_neighbors=lambda *_args, **_options: ())
    context, names = SimpleNamespace(remote_id=None), {DHTID.generate(key).to_bytes() for key in keys}
    good = dht_pb2.FindRequest(keys=sorted(names)[:16], peer=dht_pb2.NodeInfo(node_id=DHTID.generate("x").to_bytes()))
    assert len((await protocol.rpc_find(good, context)).results) == len(good.keys)
    good.keys[:] = [DHTID.generate(key).to_bytes() for key in keys]
    with pytest.raises(ValueError, match="too many keys"):
        await protocol.rpc_find(good, context)


def test_refused_records_take_up_no_room(monkeypatch):
    """1000 of 34 bytes, unsigned or malformed, hid all peers that joined on the same day."""
    monkeypatch.setattr(RunValidator, "MAX_SUBKEYS", 3)
    (validator,), own_subkey = make_validators("run", KEY)

    def store(subkey: bytes, value: object) -> bool:
        return is_valid(validator, make_record(REPORT, subkey, MSGPackSerializer.dumps(value)))

    assert not any(store(b"%d" % number + tail, None) for number in range(9) for tail in (b"", own_subkey))
    assert not store(own_subkey, "junk") and store(own_subkey, {"protocol": 5})


@pytest.mark.parametrize("name", ["metrics", REPORT, "state_averager.all_averagers"])
@pytest.mark.parametrize(
    "value",
    [*RAW, b"\xff" * 100, b"\xdd\xff\xff\xff\xff", b"\xc7\x03\x63abc", nest(9)],
    ids=lambda value: value[:6].hex(),
)
def test_values_that_cannot_be_read_back_are_refused(name, value):
    validators, own_subkey = make_validators("run", KEY)
    composite = CompositeValidator(validators)
    assert not any(is_valid(composite, make_record(name, subkey, value)) for subkey in (own_subkey, b"12D3KooW"))


@pytest.mark.parametrize("subkey", [b"", b"\xc0", b"\xc1", b"\x90", b"\x01"], ids=lambda subkey: subkey.hex())
def test_records_without_a_proper_subkey_are_refused_under_any_key(subkey):
    """Otherwise hivemind's nodes would refuse all records with a subkey under the same key."""
    record = dataclasses.replace(make_record("metrics", b"", MSGPackSerializer.dumps(1)), subkey=subkey)
    assert not CompositeValidator(make_validators("run", KEY)[0]).validate(record)


def test_record_that_many_nodes_answer_with_is_checked_once(monkeypatch):
    """With 16 peers, validation took 60 % of the DHT's time."""
    (validator,), own_subkey = make_validators("run", KEY)
    checked = []
    verify = RSAPublicKey.verify
    monkeypatch.setattr(RSAPublicKey, "verify", lambda *args: checked.append(args) or verify(*args))
    record = make_record("metrics", own_subkey, MSGPackSerializer.dumps(GOOD))
    signed = dataclasses.replace(record, value=validator.sign_value(record))
    assert all(validator.validate(signed) for _ in range(16)) and len(checked) == 1
    forged = [
        dataclasses.replace(signed, expiration_time=record.expiration_time + 1),
        dataclasses.replace(signed, value=signed.value.replace(b"step", b"stop")),
        dataclasses.replace(signed, key=DHTID.generate("run_trainers").to_bytes()),
    ]
    assert not any(validator.validate(other) for other in forged for _ in range(2)), "none is remembered as valid"
    assert len(checked) == 7


@pytest.mark.usefixtures("patches")
def test_extension_types_inside_of_each_other_are_refused_and_do_not_end_the_process():
    with pytest.raises(ValueError, match="nested too deeply"):
        MSGPackSerializer.loads(nest(1000, extension=True))
    assert MSGPackSerializer.loads(nest(8, extension=True)), "the count starts anew"
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps((1, (2, (3,))))) == (1, (2, (3,)))


def test_identity_is_written_once_and_for_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "identity.key"
    first = load_identity(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_identity(path).get_public_key().to_bytes() == first.get_public_key().to_bytes()
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\x00\x12\x04abcd"])
def test_file_that_is_no_identity_is_named(tmp_path, content):
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"identity_path.*identity\.key"):
        load_identity(path)
    assert path.read_bytes() == content


def test_addresses_that_reach_farthest_are_handed_out():
    loopback, lan = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "/ip4/192.168.1.5/tcp/1"
    public, name = "/ip4/8.8.8.8/tcp/1", "/dns4/0.tcp.example.org/tcp/5"
    assert choose_maddrs([Multiaddr(loopback)]) == [loopback]
    assert choose_maddrs([Multiaddr(loopback), Multiaddr(lan)]) == [lan]
    assert choose_maddrs([Multiaddr(a) for a in (loopback, lan, public, name, public)]) == [public, name]
    assert choose_maddrs([Multiaddr(loopback)], only_p2p=True) == ["/p2p/" + loopback.split("/")[-1]]
    assert choose_maddrs([]) == [] == choose_maddrs([Multiaddr(lan)], least=3)


def test_port_is_fixed_before_it_is_announced():
    maddrs, port = fix_tcp_port(["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"])
    assert port > 0 and maddrs == [f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}"]
    assert fix_tcp_port(["/ip4/0.0.0.0/tcp/31337"]) == (["/ip4/0.0.0.0/tcp/31337"], 31337)


@pytest.mark.parametrize("answer", ["203.0.113.7\n", "<html>busy</html>", None])
def test_public_address_is_announced_with_the_real_port(monkeypatch, answer):
    def get(url: str, timeout: float) -> SimpleNamespace:
        if answer is None:
            raise requests.ConnectionError("refused")
        return SimpleNamespace(text=answer, raise_for_status=lambda: None)

    monkeypatch.setattr(requests, "get", get)
    args, is_address = BaseTrainingArguments(), answer is not None and answer.startswith("203")
    with nullcontext() if is_address else pytest.raises(UserError, match=r"--use_google_dns.*--announce_maddrs"):
        announce_public_ip(args, "https://example.org/")
        port = Multiaddr(args.host_maddrs[0])["tcp"]
        assert port != "0" and args.announce_maddrs == [f"/ip4/203.0.113.7/tcp/{port}"]


@pytest.mark.peers
def test_full_records_survive_the_pipe_and_the_dht(tmp_path):
    """The largest record is stored and read hundreds of times; hivemind's control pipe breaks above 16 KiB."""
    with local_peer(tmp_path, "run") as peer:
        for _ in range(200):
            store_record(peer.dht, "run_trainers", peer.public_key, LARGEST, 60)
        found = get_dictionary(peer.dht, "run_trainers")
        assert [record.value for record in found.values()] == [LARGEST]
        assert get_dictionary(peer.dht, "run_metrics") == {}


def call_and_die(dht, number: int) -> None:
    for _ in range(number):
        dht.get("key", return_future=True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.peers
def test_dht_goes_on_at_once_after_calls_of_processes_that_have_died(tmp_path):
    """As averagers do when they are shut down or killed."""
    with local_peer(tmp_path, "run") as peer:
        process = psutil.Process(peer.dht.pid)
        process.suspend()  # so that the callers end before the DHT reads their calls
        caller = multiprocessing.Process(target=call_and_die, args=(peer.dht, 60))
        caller.start()
        caller.join()
        process.resume()
        peer.dht.get("key", return_future=True).result(100)  # hivemind takes three seconds for each


def test_initial_peer_that_is_away_is_not_dialed_through_libp2p():
    """libp2p would refuse to dial the peer for long after its return."""

    async def redial_while(listens: bool) -> tuple[list[float | None], int]:
        node, port = Mock(), get_free_port()
        connect = node.p2p._client.connect = AsyncMock()
        pong = dht_pb2.PingResponse(dht_time=run_time() + 6.0)
        node.protocol.call_ping = node.protocol.get_stub.return_value.rpc_ping = AsyncMock(return_value=pong)
        maddr = f"/ip4/127.0.0.1/tcp/{port}/p2p/QmcH4MyH7czQHqJJb4A9y68eHv3yTSUc5uRpf8JXU6H7wu"
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port if listens else 0):
            return await dial_all(None, node, [maddr]), connect.await_count

    assert asyncio.run(redial_while(listens=False)) == ([None], 0)
    assert asyncio.run(redial_while(listens=True)) == ([pytest.approx(6.0, abs=0.1)], 1)


def test_tcp_endpoint_of_an_address():
    for host in ("/ip4/192.0.2.1", "/ip6/2001:db8::1", "/dns4/x.example.org"):
        assert find_tcp_endpoint(f"{host}/tcp/31337/p2p/Qm") == (host.split("/")[2], 31337)
    assert find_tcp_endpoint("/ip4/192.0.2.1/udp/31337/quic") is find_tcp_endpoint("/p2p/Qm") is None
