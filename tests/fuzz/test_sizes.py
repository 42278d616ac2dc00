"""Each parser of what a peer sends, with bytes behind a valid message, with repetitions, and with inflated fields.

A message may have 4 MiB. Whatever it has, reading it takes bounded time and memory, and little of it is kept.
"""

import asyncio
import dataclasses
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from google.protobuf.message import Message
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
from hivemind.proto import averaging_pb2, dht_pb2
from hivemind.utils import MSGPackSerializer

from cotrain.admission.admission import Admission
from cotrain.admission.revocations import Revocations
from cotrain.peer.signed_settings import choose
from peerstep.reports.marks import parse_marks
from peerstep.reports.progress_report import parse_progress
from peerstep.rounds.claims import KEY_BYTES, SIGNATURE_BYTES, Claims
from peerstep.rounds.known_peers import parse_list
from peerstep.state.digest import Digest
from peerstep.state.download import StateDownload, rank_donors
from peerstep.tensors.checks import TensorAssembler
from tests.fuzz.mutations import bounded
from tests.fuzz.test_parsers import (
    AUTHORITY,
    INVITATION,
    KEY,
    LIST,
    MARKS,
    OWN,
    PEER,
    PROGRESS,
    RECORDS,
    SUBKEY,
    averager,
    key_of,
    matchmaking,
    read_found,
    read_token,
    spec_of,
)
from tests.support.dht_records import make_validators, metric
from tests.support.state import snapshot

LIMIT = DEFAULT_MAX_MSG_SIZE - 100
MAX_KEPT = 8192  # bytes of what a parser returns, pickled
TENSOR = torch.ones(300)

pytestmark = pytest.mark.usefixtures("patches")


# Messages, and what reads them


def dumps(value: object) -> Callable[[], bytes]:
    return lambda: MSGPackSerializer.dumps(value)


def loads(parse: Callable) -> Callable:
    """Read msgpack before a parser, as hivemind does."""
    return lambda content: parse(MSGPackSerializer.loads(content))


ENTRY = Claims(1.0).pack() + bytes(SIGNATURE_BYTES)


def make_join() -> bytes:
    request = averaging_pb2.JoinRequest(schema_hash=b"schema", gather=ENTRY + bytes(KEY_BYTES), group_key="17")
    return request.SerializeToString()


def join(content: bytes) -> bytes:
    """Return what a leader keeps of a request."""
    request = averaging_pb2.JoinRequest.FromString(content)
    asked = matchmaking().requests
    asked.known.has_signed = lambda *_: True
    return request.SerializeToString() if asked.refuse(request, PeerID(b"other")) is None else b""


def make_group() -> bytes:
    ids = [PEER.to_bytes(), b"\x12\x20" + bytes(32)]
    message = averaging_pb2.MessageFromLeader(ordered_peer_ids=ids, gathered=[ENTRY] * 2)
    return message.SerializeToString()


def read_group(content: bytes) -> object:
    return parse_list(averaging_pb2.MessageFromLeader.FromString(content))


def make_record() -> DHTRecord:
    value = MSGPackSerializer.dumps(metric(17))
    record = DHTRecord(key_of("metrics"), MSGPackSerializer.dumps(SUBKEY), value, time.time() + 60)
    return dataclasses.replace(record, value=make_validators("run", KEY)[0][0].sign_value(record))


def store(**change: bytes) -> bytes:
    """Return what a node keeps of a record."""
    record = dataclasses.replace(make_record(), **change)
    is_valid = make_validators("run", KEY)[0][0].validate(record)
    return record.value + record.subkey if is_valid else b""


def make_found() -> bytes:
    record, dictionary = make_record(), DictionaryDHTValue()
    dictionary.store(SUBKEY, record.value, record.expiration_time)
    result = dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY, value=MSGPackSerializer.dumps(dictionary),
        expiration_time=record.expiration_time, nearest_node_ids=[bytes(20)], nearest_peer_ids=[PEER.to_bytes()],
    )  # fmt: skip
    return dht_pb2.FindResponse(results=[result]).SerializeToString()


def list_found(content: bytes) -> list:
    """Return the values of an answer."""
    found = read_found(dht_pb2.FindResponse.FromString(content)) or {}
    return [item.value for value, _ in found.values() if value is not None for _, item in value.value.items()]


def show_token(content: bytes) -> int:
    """Return the number of peers that are admitted."""
    admission = Admission(OWN, Path("no such file"))
    asyncio.run(admission.answer(content, INVITATION.peer_id))
    return len(admission.admitted)


def ask_for_token(content: bytes) -> bytes:
    """Return the revocation list that is kept of an answer."""
    admission = Admission(OWN, Path("no such file"))
    read_token(admission, content)
    return admission.revocations.newest.content


def make_metadata() -> bytes:
    return MSGPackSerializer.dumps({**snapshot(averager())[0], "epoch": 17, "marks": MARKS})


def read_metadata(content: bytes) -> int:
    return StateDownload(averager(), averager().layout, 60.0, 8, 20, 60.0).read_metadata(content)["epoch"]


def make_chunk() -> bytes:
    part = {"size": [300], "dtype": "float32", "buffer": bytes(500)}
    return averaging_pb2.DownloadData(tensor_part=part).SerializeToString()


def assemble(content: bytes) -> int:
    """Return the number of bytes that are kept of chunks of a tensor which are all the same."""
    assembler = TensorAssembler([spec_of(TENSOR)])
    for _ in range(2):
        assembler.add(averaging_pb2.DownloadData.FromString(content).tensor_part)
    return len(assembler.buffer)


def make_answer() -> bytes:
    return averager().compute_digest(bytes(8)).SerializeToString()


def parse_digest(content: bytes) -> int:
    return Digest.parse(averaging_pb2.DownloadData.FromString(content), averager().layout.num_groups).sums.numel()


def pack_digest(content: bytes) -> int:
    request = averaging_pb2.DownloadData.FromString(content)
    return len(averager().compute_digest(request.metadata).tensor_part.buffer)


PARSERS: dict[str, tuple[Callable, Callable, type | None]] = {  # makes a message, reads it, and its protobuf type
    "join request": (make_join, join, averaging_pb2.JoinRequest),
    "group": (make_group, read_group, averaging_pb2.MessageFromLeader),
    "marks": (dumps(MARKS), loads(parse_marks), None),
    "report": (dumps(PROGRESS), loads(lambda value: parse_progress(b"", value)), None),
    "value of a record": (lambda: make_record().value, lambda content: store(value=content), None),
    "subkey of a record": (lambda: make_record().subkey, lambda content: store(subkey=content), None),
    "found": (make_found, list_found, dht_pb2.FindResponse),
    "settings": (dumps({SUBKEY: RECORDS["run_config"]}), loads(lambda records: choose(records, {PEER})), None),
    "offers": (dumps({SUBKEY: 17.0}), loads(lambda offers: rank_donors(dict.fromkeys(offers), 17.0, None)), None),
    "request of a token": (dumps([INVITATION.token.SerializeToString(), 0]), show_token, None),
    "answer with a token": (dumps([INVITATION.token.SerializeToString(), LIST]), ask_for_token, None),
    "revocations": (lambda: LIST, lambda content: Revocations.parse(content, AUTHORITY.get_public_key()), None),
    "metadata of a state": (make_metadata, read_metadata, None),
    "chunk of a state": (make_chunk, assemble, averaging_pb2.DownloadData),
    "comparison": (make_answer, parse_digest, averaging_pb2.DownloadData),
    "request of a comparison": (
        lambda: averaging_pb2.DownloadData(metadata=bytes(8)).SerializeToString(), pack_digest,
        averaging_pb2.DownloadData,
    ),
    "peer ID": (PEER.to_bytes, PeerID, None),
}  # fmt: skip


# Larger messages


def list_larger(content: bytes, kind: type[Message] | None) -> dict[str, bytes]:
    """Return larger forms of a message: what was done -> bytes, at most LIMIT of them."""
    larger = {
        "one byte behind it": content + b"\0",
        "as many as possible behind it": content + bytes(LIMIT - len(content)),
        "repeated": content * (LIMIT // len(content)),
        "many bytes before it": b"~" * (LIMIT - len(content)) + content,
        "some bytes before it": b"~" * 50_000 + content,
        "an unknown field": content + b"\xfa\x07\x80\x80\xe0\x01" + bytes(2**19 * 7),  # of 3.5 MiB
    }
    if kind is not None:
        message = kind.FromString(content)
        for field, _ in message.ListFields():
            larger[field.name] = _inflate_field(kind.FromString(content), field)
        return {name: changed for name, changed in larger.items() if changed is not None}
    try:
        value = MSGPackSerializer.loads(content)
    except Exception:
        return larger
    for number in range(8):
        if (changed := _inflate_value(value, [number])) is not None:
            larger[f"value {number}"] = MSGPackSerializer.dumps(changed)
    return larger


def _inflate_field(message: Message, field) -> bytes | None:
    """Repeat the values of a field, or its bytes; None for a number or a single message."""
    value = getattr(message, field.name)
    if field.is_repeated:
        parts = list(value)
        size = max(
            2, parts[0].ByteSize() if field.message_type else len(parts[0]) if hasattr(parts[0], "__len__") else 5
        )
        value.extend(parts[:1] * ((LIMIT - message.ByteSize()) // (size + 4)))
    elif isinstance(value, bytes | str):
        setattr(message, field.name, value + (value[-1:] or b"x") * (LIMIT - message.ByteSize() - 10))
    else:
        return None
    return message.SerializeToString()


def _inflate_value(value: object, countdown: list[int]) -> object | None:
    """Repeat one part of plain data, the one at which the countdown ends; None if it has fewer."""
    countdown[0] -= 1
    if countdown[0] < 0:
        if isinstance(value, bytes | str | list):
            return value * max(1, LIMIT // (2 * max(1, len(MSGPackSerializer.dumps(value)))))
        if isinstance(value, dict):
            part = next(iter(value.values()), 0)
            count = LIMIT // (2 * (16 + len(MSGPackSerializer.dumps(part))))
            return value | {f"{number:010d}": part for number in range(count)}
        return [value] * (LIMIT // 10)
    if isinstance(value, dict | list):
        for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if (changed := _inflate_value(child, countdown)) is not None:
                copied = dict(value) if isinstance(value, dict) else list(value)
                copied[key] = changed
                return copied
    return None


@pytest.mark.parametrize("name", PARSERS)
def test_larger_messages_take_little_and_leave_little(name):
    make, read, kind = PARSERS[name]
    content = make()
    assert bounded(read, content, refusals=()) is not None, "the message is valid"
    for change, larger in list_larger(content, kind).items():
        assert len(larger) <= DEFAULT_MAX_MSG_SIZE
        kept = len(pickle.dumps(bounded(read, larger, refusals=(Exception,))))
        assert kept <= MAX_KEPT, f"{change}: {kept:,} bytes are kept"
