"""The log."""

import logging

from cotrain.common.logs import TracebackFilter


def test_traceback_of_hivemind_becomes_a_line():
    try:
        raise RuntimeError("Peer went\naway")
    except RuntimeError as error:
        info, message = (type(error), error, error.__traceback__), error
    record = logging.LogRecord("hivemind.averaging.averager", logging.ERROR, "", 0, message, None, info)
    assert TracebackFilter().filter(record)
    assert record.getMessage() == "Peer went away" and record.levelname == "WARN" and record.exc_info is None
    own = logging.LogRecord("callback", logging.ERROR, "", 0, "Failed", None, info)
    assert TracebackFilter().filter(own) and own.exc_info is info and own.levelno == logging.ERROR
