"""Each parser of what comes from the network, with mutations of valid messages, signed where a stranger may sign."""

import asyncio
import dataclasses
import gzip
import io
import json
import math
import socket
import tarfile
import tempfile
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, patch

import pytest
import torch
from hivemind.compression import CompressionInfo, TensorRole, deserialize_torch_tensor
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID, ServicerBase
from hivemind.proto import averaging_pb2, dht_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.streaming import split_for_streaming
from hivemind.utils.timed_storage import ValueWithExpiration
from hypothesis import strategies as st

from arguments import TRAINER_ARGUMENTS
from cotrain.admission.admission import Admission
from cotrain.admission.invitations import InvitationError, check_token, make_invitation
from cotrain.admission.revocations import Revocations
from cotrain.common.argument_parser import ArgumentParser
from cotrain.common.errors import UserError
from cotrain.data.archive import DATASET, MIN_LIMIT, TOKENIZER, unpack_archive
from cotrain.data.manifest import Manifest
from cotrain.monitoring.advice import parse_shares
from cotrain.monitoring.aggregation import MetricsAggregator
from cotrain.monitoring.contributors import Contributors
from cotrain.peer.adoption import refuse_differences
from cotrain.peer.signed_settings import RunConfig, check_safe, choose
from peerstep.peer.node import DHTProtocol, bucket_of, node_id_of
from peerstep.reports.marks import MAX_STEP, NUM_MARKS, add_mark, parse_marks
from peerstep.reports.progress_report import PeerProgress, parse_progress
from peerstep.reports.records import peer_id_of
from peerstep.rounds.bounds import MIN_WEIGHT, Bounds, ViolationError
from peerstep.rounds.claims import KEY_BYTES, SIGNATURE_BYTES, Claims, deal, parse_claims
from peerstep.rounds.known_peers import MAX_HELD_REQUESTS, parse_list
from peerstep.rounds.matchmaking import StepMatchmaking
from peerstep.rounds.requests import parse_step
from peerstep.state.download import StateDownload, rank_donors
from peerstep.state.layout import read_position
from peerstep.tensors.checks import TensorAssembler, TensorSpec, check_tensor
from peerstep.tensors.compression import COMPRESSIONS
from tests.fuzz.mutations import NUMBERS, altered, altered_fields, bounded, damaged, fuzz, to_json
from tests.support.dht_records import entries, make_validators, metric, trainer_record
from tests.support.offline import offline_averager
from tests.support.state import snapshot

GRADIENT, PARAMETER = TensorRole.GRADIENT, TensorRole.PARAMETER
KEY = RSAPrivateKey()
PEER = peer_id_of(KEY.get_public_key())
SUBKEY = make_validators("run", KEY)[1]
MARKS = [list(mark) for mark in add_mark(((8, "0" * 12),), 16, bytes(range(20)))]
PROGRESS = PeerProgress(b"", epoch=17, completed=17, samples_per_second=2.5, marks=MARKS).to_record() | {"schema": ""}
SETTINGS = {"run_id": "run", "learning_rate": 0.01, "local_updates": True, "dataset_url": "https://1.1.1.1/x.tar.gz",
            "model_name_or_path": '{"model_type":"gpt2","n_layer":3}', "optimizer": "lamb"}  # fmt: skip
RECORDS = {
    "metrics": metric(17),
    "trainers": trainer_record(
        *entries(metric(16), metric(17)), username="alice", rounds=4, complete=3, computed=64, applied=60
    ),
    "monitor": {"stores_checkpoints": True, "checkpoint_step": 17},
    "training_progress": PROGRESS,
    "state_averager.all_averagers": 17.0,
    "run_config": RunConfig.sign(SETTINGS, KEY).record,
}

BOUNDS = {  # records at the bounds of what is valid, which the mutations rarely make
    "trainers": [
        trainer_record(row, **fields)
        for row in ([0] * 5 + [0.5, None], [0] * 40, [0], [0, True, 0, 0.0, 0])
        for fields in ({}, {"averaging": 0.5}, {"averaging": 2.0})
    ],
    "metrics": [{**metric(17), "x": 1e12}, {**metric(17), "x": "text"}],
    "training_progress": [None, {**PROGRESS, "away": 1}, {**PROGRESS, "samples_accumulated": -1}],
}


# Records in the DHT


def key_of(name: str) -> bytes:
    name = {"run_config": name, "training_progress": f"run_{name}.{bucket_of(SUBKEY)}"}.get(name, f"run_{name}")
    return DHTID.generate(name).to_bytes()


def read_everywhere(name: str, value: object) -> None:
    """Pass an accepted record to each of its readers."""
    found = {PEER: ValueWithExpiration(value, time.time() + 60)}
    if name in ("trainers", "training_progress"):
        progress, trainers = (
            found if name == kind else {PEER: ValueWithExpiration(RECORDS[kind], time.time() + 60)}
            for kind in ("training_progress", "trainers")
        )
        aggregator = MetricsAggregator()
        for seconds in (0, 40, 80):
            aggregator.update(time.time() + seconds, trainers, progress)
        bounded(parse_progress, PEER.to_bytes(), value)
    if name == "trainers":
        with tempfile.TemporaryDirectory() as folder:
            contributors = Contributors(Path(folder), "run")
            contributors.record_names({peer: record.value["username"] for peer, record in found.items()})
            assert contributors.find_name(PEER).isprintable()
        assert all(0 <= share <= 1 for share in parse_shares([value]).values())
    elif name == "run_config":
        choose({SUBKEY: value}, {PEER}, "run")
    else:
        rank_donors({SUBKEY: found[PEER]}, 17, None)


@fuzz(100)
def test_records(draw):
    name = draw(st.sampled_from(sorted(RECORDS)))
    (validator,), _ = make_validators("run", KEY)
    validator.MAX_SUBKEYS, validator.MAX_KNOWN = draw(st.sampled_from([1000, 1, 2])), draw(st.sampled_from([8192, 0]))
    value = MSGPackSerializer.dumps(draw(altered(draw(st.sampled_from([RECORDS[name], *BOUNDS.get(name, [])])))))
    value = draw(st.one_of(st.just(value), damaged(value)))
    subkey = draw(st.one_of(st.just(MSGPackSerializer.dumps(SUBKEY)), damaged(MSGPackSerializer.dumps(SUBKEY))))
    lifetime = draw(st.sampled_from([60.0, 60.0, 60.0, *map(float, NUMBERS)]))
    key = draw(st.sampled_from([key_of(name)] * 6 + [key_of("monitor"), b"", SUBKEY]))
    known = draw(st.lists(st.sampled_from([-1.0, 60.0]), max_size=2))
    validator.subkeys[key] = {b"%d" % index: time.time() + seconds for index, seconds in enumerate(known)}
    record = DHTRecord(key, subkey, value, time.time() + lifetime)
    signed = dataclasses.replace(record, value=validator.sign_value(record))
    if draw(st.integers(0, 7)) == 0:
        signed = dataclasses.replace(signed, value=draw(damaged(signed.value)))
    if bounded(validator.validate, signed, refusals=()):
        assert validator.validate(signed) and len(validator.subkeys[key]) <= validator.MAX_SUBKEYS
        value, subkey = (MSGPackSerializer.loads(part) for part in (validator.strip_value(signed), subkey))
        assert subkey == SUBKEY
        read_everywhere(name if key == key_of(name) else "monitor", value)


def read_found(response: dht_pb2.FindResponse) -> dict | None:
    """Return what a node reads in the answer of another one."""

    async def find() -> dict | None:
        protocol = DHTProtocol.__new__(DHTProtocol)
        (protocol.record_validator,), _ = make_validators("run", KEY)
        protocol.rpc_semaphore, protocol.node_info = asyncio.Semaphore(), dht_pb2.NodeInfo()
        protocol.wait_timeout = 1.0
        protocol.p2p, protocol.routing_table = SimpleNamespace(peer_id=PEER), RoutingTable(node_id_of(PEER), 20, 5)
        protocol.update_routing_table, protocol.call_ping = AsyncMock(), AsyncMock()
        return await protocol.call_find(PEER, [DHTID.generate("run_metrics")])

    stub = SimpleNamespace(rpc_find=AsyncMock(return_value=response), rpc_ping=None, rpc_store=None)
    with patch("hivemind.dht.protocol.DHTProtocol.get_stub", lambda _protocol, _peer: stub):
        return asyncio.run(find())


@fuzz(80)
def test_answers_of_dht_nodes(draw):
    """A node may send any value: hivemind's readers must get a dictionary of valid records or None."""
    (validator,), _ = make_validators("run", KEY)
    record = DHTRecord(key_of("metrics"), MSGPackSerializer.dumps(SUBKEY), MSGPackSerializer.dumps(metric(17)), 0.0)
    record = dataclasses.replace(record, expiration_time=time.time() + 60)
    item = [SUBKEY, validator.sign_value(record), record.expiration_time]
    maxsize, newest, items = draw(altered([None, record.expiration_time, [item]]).filter(lambda x: type(x) is list
                                          and len(x) == 3))  # fmt: skip
    packed = b"\xc9" + b"%b\x50%b" % (
        len(p := MSGPackSerializer.dumps([maxsize, newest, items])).to_bytes(4, "big"),
        p,
    )
    result = dht_pb2.FindResult(
        type=draw(st.sampled_from([dht_pb2.FOUND_DICTIONARY] * 3 + [dht_pb2.FOUND_REGULAR, dht_pb2.NOT_FOUND])),
        value=draw(damaged(packed)),
        expiration_time=draw(st.sampled_from(NUMBERS)),
        nearest_node_ids=[draw(damaged(bytes(20)))],
        nearest_peer_ids=[draw(damaged(PEER.to_bytes()))],
    )

    found = bounded(read_found, dht_pb2.FindResponse(results=[result]), refusals=())
    for value, _ in (found or {}).values():
        if value is not None and isinstance(value.value, DictionaryDHTValue):
            assert math.isfinite(value.expiration_time)
            assert all(
                type(part) is bytes for subkey, (content, _) in value.value.items() for part in (subkey, content)
            )


@fuzz(150)
def test_serializer(draw):
    storage = DictionaryDHTValue()
    storage.store(SUBKEY, b"value", time.time() + 60)
    packed = MSGPackSerializer.dumps([(1, (2.5, "x")), storage, PROGRESS])
    depth = draw(st.sampled_from([0, 1, 7, 8, 9, 400]))
    for _ in range(depth):
        packed = b"\x91\xc9" + len(packed).to_bytes(4, "big") + b"\x40" + b"\x91" + packed
    bounded(MSGPackSerializer.loads, draw(damaged(packed)), refusals=(Exception,))


# Rounds


@fuzz(200)
def test_marks(draw):
    metadata = draw(altered({"epoch": 17, "marks": MARKS}))
    marks = bounded(parse_marks, metadata.get("marks") if isinstance(metadata, dict) else metadata)
    assert marks is None or len(add_mark(marks, 18, bytes(20))) <= NUM_MARKS


@cache
def matchmaking() -> StepMatchmaking:
    options = {"target_group_size": None, "min_group_size": 2, "min_matchmaking_time": 2.0, "request_timeout": 1.0}
    p2p = SimpleNamespace(peer_id=PEER)

    async def create() -> StepMatchmaking:  # it needs an event loop
        names = {"servicer_type": ServicerBase, "prefix": "run", "client_mode": False}
        return StepMatchmaking(p2p, b"schema", p2p, **names, **options)

    return asyncio.run(create())


@fuzz(200)
def test_groups(draw):
    packed = draw(damaged(Claims(100.0, 1.0, True, 5.0, (bytes(8),)).pack()))
    parsed = bounded(parse_claims, packed)
    assert parsed is None or (0 <= parsed.bandwidth <= 1e9 and 0 <= parsed.distance <= 1e6)
    claims = packed + bytes(SIGNATURE_BYTES)
    other = draw(damaged(b"\x12\x20" + bytes(32)))
    members = draw(altered([PEER.to_bytes(), other], most=1))
    message = build(averaging_pb2.MessageFromLeader, ordered_peer_ids=members, gathered=[claims] * 2)
    entries = None if message is None else bounded(parse_list, message)
    if entries is not None:
        assert len(entries) == len(message.ordered_peer_ids)
        bounded(matchmaking().known.check_list, entries, 1, PEER, claims, {})
    if entries and parsed is not None and parsed.bandwidth > 0:
        (group,) = deal(1, dict.fromkeys(entries, parsed), None)
        assert set(group.peer_ids) == entries.keys()
    key = draw(st.one_of(st.just("17"), st.text(), st.sampled_from(["run.0b1", "1" * 19])))
    number = bounded(parse_step, key, refusals=())
    assert number is None or 0 <= number < 2**62
    schema, peer = draw(st.sampled_from([b"schema"] * 3 + [b""])), draw(st.sampled_from([b"other"] * 3 + [b"banned"]))
    request = averaging_pb2.JoinRequest(schema_hash=schema, gather=claims + bytes(KEY_BYTES), group_key=key)
    asked = matchmaking().requests
    asked.known.has_signed = lambda *_: True
    asked.finished_step = draw(st.sampled_from([-1, 16, 17, 2**62]))
    asked.held = dict.fromkeys(range(draw(st.sampled_from([0, MAX_HELD_REQUESTS]))))
    asked.conduct.ban(PeerID(b"banned"), time.time() + 60)
    accepts = bounded(asked.refuse, request, PeerID(peer), refusals=()) is None
    is_asked = number is not None and number > asked.finished_step and not asked.held
    assert accepts == (is_asked and parsed is not None and (schema, peer) == (b"schema", b"other"))


def build(message: type, **fields: object) -> object | None:
    """Build a protobuf message; None if its fields cannot have these values."""
    try:
        return message(**fields)
    except (TypeError, ValueError, OverflowError):
        return None


TENSORS = [torch.ones(300), torch.tensor(2.5), torch.zeros(0), torch.zeros(3, 0), torch.ones(3, 40).double()]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def serialized(draw, tensor: torch.Tensor) -> runtime_pb2.Tensor | None:
    name = draw(st.sampled_from(sorted(COMPRESSIONS)))
    if name == "scaled_float16" and not (tensor.ndim and tensor.numel()):
        name = "float16"
    message = COMPRESSIONS[name]().compress(tensor, info=None)
    fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return build(runtime_pb2.Tensor, **draw(altered_fields({**fields, "size": list(message.size)})))


@fuzz(200)
def test_tensors(draw):
    tensor = draw(st.sampled_from(TENSORS))
    numbers = frozenset(runtime_pb2.CompressionType.values())
    spec = dataclasses.replace(spec_of(tensor), compressions=numbers)
    if (message := serialized(draw, tensor)) is None:
        return
    if bounded(lambda: check_tensor(message, spec) or True):
        is_coded = message.compression == runtime_pb2.BLOCKWISE_8BIT  # its decoder checks the buffer
        if (restored := bounded(deserialize_torch_tensor, message, refusals=(ValueError,) * is_coded)) is None:
            return
        assert restored.shape == tensor.shape and str(restored.dtype) == f"torch.{message.dtype}"
        assert not restored.requires_grad
        info = CompressionInfo.from_tensor(restored, role=draw(st.sampled_from([GRADIENT, PARAMETER])))
        bounds = Bounds(64.0, parameter_step=draw(st.sampled_from([0.01, 1.0])))
        part = restored.float() * draw(st.sampled_from([1.0, 1e15, 1e30]))
        weight = float(draw(st.sampled_from(NUMBERS)))
        clipped = bounded(bounds.clip, info, part, torch.zeros_like(part), weight, refusals=(ViolationError,))
        assert clipped is None or (clipped[0].isfinite().all() and MIN_WEIGHT <= clipped[1] <= 64)


@fuzz(40)
def test_assembler(draw):
    assembler, size = TensorAssembler(map(spec_of, TENSORS)), draw(st.sampled_from([1, 100, 2**16]))

    def assemble() -> None:
        for tensor in TENSORS:
            if (message := serialized(draw, tensor)) is not None:
                for chunk in split_for_streaming(message, size):
                    assembler.add(chunk)
                    assert 0 <= assembler.fraction <= 1

    bounded(assemble)
    assert all(a.shape == b.shape for a, b in zip(assembler.tensors, TENSORS, strict=False))


# The training state


@fuzz(150)
def test_offers(draw):
    offers = draw(altered({SUBKEY: 17.0}))
    if isinstance(offers, dict):
        offers = {key: ValueWithExpiration(value, 1e12) for key, value in offers.items()}
    likely, unlikely = bounded(rank_donors, offers, 17.0, None, refusals=())
    assert set(likely + unlikely) <= {PEER}
    bounded(read_position, draw(altered({"epoch": 17, "marks": MARKS})), 3)


@cache
def averager():
    return offline_averager()


@fuzz(30)
def test_states(draw):
    own = averager()
    marks = draw(st.sampled_from([(), parse_marks(MARKS), ((16, "1" * 12),)]))
    download = StateDownload(own, own.layout, 60.0, min_step=8, credible_step=20, timeout=60.0, marks=marks)
    metadata, tensors = snapshot(own)
    metadata = {**metadata, "epoch": draw(st.sampled_from([17] * 3 + [7, 30, MAX_STEP])), "marks": MARKS}
    metadata["statistics"] = draw(altered(metadata["statistics"]))
    packed = draw(damaged(MSGPackSerializer.dumps(draw(altered(metadata, most=1)))))
    packed += bytes(draw(st.sampled_from([0] * 7 + [2**18])))
    position, value = draw(st.integers(0, len(tensors) - 1)), draw(st.sampled_from([0.0, *map(float, NUMBERS)]))
    limit = 3e38 if tensors[position].is_floating_point() else 2.0**62
    tensors[position].fill_(value if limit > 2.0**62 and math.isinf(value) else min(max(value, -limit), limit))

    download.believes_all = draw(st.booleans())
    num_sent = draw(st.sampled_from([len(tensors)] * 7 + [0, len(tensors) - 1]))

    def receive() -> bool:
        received = download.read_metadata(packed)
        assembler = TensorAssembler(own.layout.specs(received))
        for tensor in tensors[:num_sent]:
            for chunk in split_for_streaming(COMPRESSIONS["none"]().compress(tensor, info=None)):
                assembler.add(chunk)
        if not assembler.is_complete:  # the download waits for more, until the stream ends
            return False
        own.layout.unpack(received, assembler.tensors)
        own.restore(received, assembler.tensors)
        own.copy_state()  # for the next peer
        return True

    if bounded(receive):
        state = own.optimizer.state.values()
        assert all(torch.as_tensor(value).isfinite().all() for values in state for value in values.values())


# Admission


AUTHORITY = RSAPrivateKey()
INVITATION = make_invitation(AUTHORITY, "alice", days=1)
OWN, EXPIRED = (make_invitation(AUTHORITY, "bob", days=days) for days in (1, -1))
LIST = Revocations().extend({str(PEER)}, AUTHORITY).content


def read_token(admission: Admission, answer: bytes) -> None:
    """Let a peer that asks another one for its token read the answer."""
    p2p = SimpleNamespace(_client=SimpleNamespace(call_unary_handler=AsyncMock(return_value=answer)))
    asyncio.run(admission.exchange(p2p, INVITATION.peer_id))


@fuzz(80)
def test_invitations(draw):
    token, authority = INVITATION.token, AUTHORITY.get_public_key()
    names = ("username", "public_key", "expiration_time", "signature")
    signed = draw(st.sampled_from([token] * 4 + [OWN.token, EXPIRED.token]))
    changed = build(type(token), **draw(altered_fields({name: getattr(signed, name) for name in names})))
    if changed is not None:
        is_valid = bounded(check_token, changed, authority, INVITATION.peer_id, refusals=(InvitationError,))
        changed.signature = token.signature  # base64 has many forms of the same bytes
        assert not is_valid or changed == token
    content = draw(damaged(LIST))
    revoked = bounded(Revocations.parse, content, authority, refusals=(InvitationError,))
    assert revoked is None or revoked.peers == {str(PEER)}
    serialized_token = (changed or token).SerializeToString()
    request, answer = draw(altered([serialized_token, 0])), draw(altered([serialized_token, content]))
    with tempfile.TemporaryDirectory() as folder:
        admission = Admission(OWN, Path(folder) / "list")
        packed, answer = (draw(damaged(MSGPackSerializer.dumps(part))) for part in (request, answer))
        # hivemind returns each exception of this handler to the caller
        bounded(lambda: asyncio.run(admission.answer(packed, INVITATION.peer_id)), refusals=(Exception,))
        bounded(read_token, admission, answer, refusals=())
        assert admission.admitted.keys() <= {INVITATION.peer_id}


# The settings of a run


@cache
def command_line():
    return ArgumentParser(TRAINER_ARGUMENTS, "test").parse([])


@fuzz(60)
def test_settings_of_a_run(draw):
    content = json.loads(RECORDS["run_config"]["text"])
    content["time"] = draw(st.sampled_from([content["time"]] * len(NUMBERS) + NUMBERS))
    text = json.dumps(to_json(draw(altered(content))), separators=(",", ":"))
    record = {**RECORDS["run_config"], "text": text, "signature": KEY.sign(text.encode())}
    if draw(st.integers(0, 3)) == 0:
        record = draw(altered(record))
    config = bounded(RunConfig.parse, record, PEER)
    choose({SUBKEY: record, b"x": config and config.record}, {PEER})
    if config is None:
        return

    def adopt() -> None:
        check_safe(config.settings)
        refuse_differences(config, command_line().with_settings(config.settings))

    with patch.object(socket, "getaddrinfo", side_effect=socket.gaierror):
        bounded(adopt, refusals=(UserError, SystemExit))


# The prepared data


MANIFEST = {"source": "x", "objective": "mlm", "max_seq_length": 64, "seed": 0, "language": "en", "tokenizer": "x",
            "tokenizer_class": "x", "vocab_size": 9, "tokenizer_sha256": "0" * 64, "format_version": 1,
            "splits": {"train": {"instances": 5}}}  # fmt: skip
PAX = ["mtime", "size", "path", "uid", "uname", "linkpath", "hdrcharset", "GNU.sparse.major", "GNU.sparse.map",
       "GNU.sparse.size", "GNU.sparse.name", "comment"]  # fmt: skip


@fuzz(40)
def test_archives(draw):
    manifest = json.dumps(to_json(draw(altered(MANIFEST)))).encode()
    buffer = io.BytesIO()
    with tarfile.open(mode="w", fileobj=buffer, format=draw(st.sampled_from([0, 1, 2]))) as archive:
        for name in ("manifest.json", "train/data.arrow"):
            entry = tarfile.TarInfo(f"{draw(st.sampled_from([DATASET] * 4 + [TOKENIZER, 'data']))}/{name}")
            entry.size = draw(st.sampled_from([len(manifest)] * 4 + [0, MIN_LIMIT + 1, 2**32]))
            values = st.one_of(st.sampled_from(["", "1", "-1", "1e9", "inf", "nan", "9" * 30, "0,1", "x"]), st.text())
            entry.pax_headers = draw(st.dictionaries(st.sampled_from(PAX), values, max_size=2))
            entry.type = draw(st.sampled_from([tarfile.REGTYPE] * 8 + list(tarfile.SUPPORTED_TYPES)))
            archive.addfile(entry, io.BytesIO(manifest) if entry.size == len(manifest) else None)
    packed = draw(damaged(gzip.compress(draw(damaged(buffer.getvalue())), 1)))
    with tempfile.TemporaryDirectory() as folder:
        path, target = Path(folder) / "archive", Path(folder) / "data"
        path.write_bytes(packed)
        target.mkdir()
        folders = draw(st.sampled_from([[DATASET], [DATASET, TOKENIZER]]))
        bounded(unpack_archive, path, dict.fromkeys(folders, target), refusals=(UserError,))
        assert set(target.rglob("*")) <= {target / name for name in ("manifest.json", "train", "train/data.arrow")}
        (target / "manifest.json").write_bytes(draw(st.one_of(st.just(manifest), damaged(manifest))))
        bounded(Manifest.load, target, refusals=(UserError,))


# What the mutations, or their making, have found


@pytest.mark.usefixtures("patches")
def test_peer_ids_of_impossible_length_are_refused():
    """base58 takes 2 s for 50 KB, and hours for a message of 4 MiB."""
    message = averaging_pb2.MessageFromLeader(ordered_peer_ids=[PEER.to_bytes(), bytes(10**6)], gathered=[b"", b""])
    assert bounded(parse_list, message, refusals=(ValueError,)) is None
    with pytest.raises(ValueError, match="1000000 bytes"):
        PeerID(bytes(10**6))


@pytest.mark.usefixtures("patches")
def test_unknown_extension_types_are_refused_without_a_warning(caplog):
    """hivemind logs one for each: 20 in the 64 bytes of a member's claims."""
    with pytest.raises(ValueError, match="unknown extension type 99"):
        MSGPackSerializer.loads(b"\xd4\x63\0")
    assert not caplog.records


def test_scalar_with_a_mean_and_a_deviation_is_refused():
    message = runtime_pb2.Tensor(compression=runtime_pb2.MEANSTD_16BIT, dtype="float32", buffer=bytes(10))
    with pytest.raises(ValueError, match="not supported"):
        TensorAssembler([TensorSpec(())]).add(message)


@pytest.mark.parametrize("change", [{"name": f"{TOKENIZER}/{'n' * 300}.json"}, {"pax_headers": {"mtime": "inf"}}])
def test_archive_with_an_impossible_name_or_time(tmp_path, change):
    entry = tarfile.TarInfo(f"{TOKENIZER}/vocab.txt")
    for name, value in change.items():
        setattr(entry, name, value)
    with tarfile.open(tmp_path / "archive", "w:gz") as archive:
        archive.addfile(entry)
    with pytest.raises(UserError, match="damaged|not part of the prepared data"):
        unpack_archive(tmp_path / "archive", {TOKENIZER: tmp_path})


def test_address_that_is_a_number():
    check_safe({"dataset_url": 1})  # the flag's own check refuses it


def test_manifest_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "manifest.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(UserError, match="cannot be read"):
        Manifest.load(tmp_path)
