"""Mutations of valid messages, and the bounds that each parser of a stranger's message must keep."""

import logging
import time
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MAX_SECONDS = 2.0  # CPU time of one example; some take 0.2 s, and 1.2 s on a busy machine
MAX_BYTES = 100 * 2**20
LONGER = 30  # times as many examples in `make test-all`

NUMBERS = [0, 1, -1, 5, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -0.5, 1e-300, 1e12, 1e308,
           float("nan"), float("inf"), float("-inf"), True, False]  # fmt: skip
TEXTS = ["", "x", "0" * 12, "\0", "\x1b[31m", "\u202eevil", "../x", "-x", "nan", "9" * 400, "x" * 3000, "tensor"]
BYTES = [b"", b"\0", b"\xff", b"\xc1", b"\xd4\x63\0", b"\xdd\xff\xff\xff\xff", b"[owner:x]", b"x" * 100, bytes(5000)]
NASTY = st.sampled_from([None, *NUMBERS, *TEXTS, *BYTES, [], {}, [[]], {"": None}, [0] * 100])


@st.composite
def altered(draw: Callable, value: object, most: int = 3) -> object:
    """Plain data with up to `most` changes of values, types, names, lengths and nesting."""
    for _ in range(draw(st.integers(0, most))):
        value = draw(_altered_once(value))
    return value


@st.composite
def _altered_once(draw: Callable, value: object) -> object:
    if isinstance(value, bytes) and draw(st.booleans()):
        return draw(damaged(value))
    if not isinstance(value, dict | list | tuple) or not value or draw(st.integers(0, 7)) == 0:
        nested = NASTY.map(lambda nasty: [nasty, value])
        return draw(st.one_of(NASTY, nested, st.integers(-(2**63), 2**64 - 1), st.floats(), st.text()))
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    position = draw(st.integers(0, len(items) - 1))
    key, child = items[position]
    match draw(st.sampled_from(["change", "change", "change", "drop", "add", "repeat"])):
        case "change":
            items[position] = key, draw(_altered_once(child))
        case "drop":
            del items[position]
        case "add":
            items.append((draw(st.sampled_from(["x", "dict", "__class__", b"x", "9" * 40])), draw(NASTY)))
        case "repeat":
            items += [(f"{key}{number}", child) for number in range(draw(st.sampled_from([1, 8, 70])))]
    return dict(items) if isinstance(value, dict) else [child for _, child in items]


@st.composite
def damaged(draw: Callable, content: bytes) -> bytes:
    """Bytes with up to three cuts, insertions, repetitions, and replacements by as many bytes."""
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(content)))
        end = min(len(content), begin + draw(st.sampled_from([0, 1, 4, 1000])))
        part = draw(st.one_of(st.sampled_from(BYTES), st.binary(max_size=8), st.just(content[begin:end] * 5)))
        if draw(st.booleans()):
            part = part[: end - begin].ljust(end - begin, b"\xff")
        content = content[:begin] + part + content[end:]
    return content


def altered_fields(value: dict) -> st.SearchStrategy[dict]:
    """Alterations of a dictionary that leave it one with names."""
    return altered(value).filter(lambda new: isinstance(new, dict) and all(isinstance(name, str) for name in new))


def to_json(value: object) -> object:
    """Replace what JSON does not have by text."""
    if isinstance(value, dict):
        return {str(name): to_json(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(child) for child in value]
    return repr(value) if isinstance(value, bytes) else value


class Alarm(logging.Handler):
    """Keeps what the parsers log: a stranger could fill the disk with it."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def bounded(parse: Callable, *args, refusals: tuple[type[BaseException], ...] = (ValueError,)) -> object:
    """Call a parser: None if it refuses its input, and an AssertionError if that takes much time or memory."""
    tracemalloc.start()
    started = time.process_time()
    try:
        return parse(*args)
    except refusals:
        return None
    finally:
        seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert seconds < MAX_SECONDS and peak < MAX_BYTES, f"{seconds:.1f} s, {peak / 1e6:.0f} MB"


def fuzz(examples: int) -> Callable:
    """Decorate a test that takes `draw`: it runs with `examples` examples, and with more in `make test-all`.

    No example may log a line above DEBUG.
    """
    numbers = [pytest.param(examples, id="short"), pytest.param(examples * LONGER, id="long", marks=pytest.mark.long)]

    def decorate(check: Callable) -> Callable:
        @pytest.mark.parametrize("number", numbers)
        @pytest.mark.usefixtures("patches")
        def test(number: int) -> None:
            options = {"derandomize": True, "database": None, "deadline": None, "report_multiple_bugs": False}
            alarm, loggers = Alarm(), [logging.getLogger(name) for name in ("cotrain", "peerstep", "hivemind")]
            for logger in loggers:
                logger.addHandler(alarm)
            try:
                run = given(st.data())(lambda data: check(data.draw))
                settings(max_examples=number, suppress_health_check=list(HealthCheck), **options)(run)()
            finally:
                for logger in loggers:
                    logger.removeHandler(alarm)
            assert not alarm.lines, alarm.lines[:3]

        return test

    return decorate
