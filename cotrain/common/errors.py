"""Errors of the scripts: a line that names the flag or file and the remedy, sometimes a hint, and an exit code."""

import errno
import io
import json
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TextIO

from cotrain import explain_hidden_module
from cotrain.common.diagnosis import next_hint
from cotrain.common.versions import compare_versions, read_requirements
from peerstep.errors import PeerError
from peerstep.peer.processes import EXIT_TEMPORARY as TEMPORARY

INSTALL_ALL = "run pip install -r requirements.txt"
# Modules that are in requirements-organiser.txt, but not in requirements.txt.
ORGANISER_MODULES = {"boto3", "trackio", "trl"}
# Modules that only some flags need -> how to install them
INSTALL = {
    **dict.fromkeys(ORGANISER_MODULES, "pip install -r requirements-organiser.txt"),
    "ngrok": "pip install ngrok==1.4.0",  # the version that was tested
    "wandb": "pip install -r requirements.txt",
    "tensorboard": "pip install tensorboard",
}


# Seconds after which a script says that it loads libraries: --help takes 0.6, beside ten busy processes on two cores 6
FIRST_WORD_SECONDS = 1.0
_first_word = threading.Lock()  # taken by who says it


class UserError(PeerError):
    """An error that the user can fix. The message is one line: what is wrong, where, and what to do."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows instead of a traceback."""
        return [f"error: {self}"]


class TemporaryError(UserError):
    """An error that may pass by itself: another peer or a server did not answer. The exit code is TEMPORARY."""

    retryable = True


def require_packages(arguments: Iterable[object]) -> None:
    """Raise UserError if the package of a dashboard or a tunnel that a script's arguments name is not installed."""
    for args, flag in product(arguments, ("report_to", "tunnel")):
        # A folder `wandb`, as offline runs write it, is found too, without an origin.
        if (name := getattr(args, flag, "none")) != "none" and getattr(find_spec(name), "origin", None) is None:
            # The flag that was passed, which implies the other one
            implying = {"wandb": "wandb_project", "trackio": "space_id"}.get(name, "")
            value = getattr(args, implying, None)
            what = f"--{flag} {name}" if value is None else f"--{implying} {value}"
            raise UserError(f"{what}: {describe(ModuleNotFoundError(name=name))}")


def require_writable(folder: Path, flag: str) -> None:
    """Raise UserError, naming the flag, if no file can be made in a folder, or in its nearest parent that exists."""
    try:
        tempfile.TemporaryFile(dir=next(filter(Path.exists, (folder, *folder.parents)))).close()
    except OSError as error:
        raise UserError(f"{flag}: no file can be written in '{folder}' ({error.strerror}); choose another") from None


def first_line(error: BaseException, limit: int | None = 200) -> str:
    """Return the first line of an error's message, at most `limit` characters; its class if there is no message."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno} is not valid JSON"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    message = re.sub(r"\[Errno -?\d+\] ", "", str(error))
    return next(iter(message.strip().splitlines()), type(error).__name__)[:limit]


def describe(error: BaseException) -> str:
    """Return one line for an error, with the remedy where one is known."""
    if isinstance(error, PeerError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in INSTALL:
        return f"{error.name} is not installed: {INSTALL[error.name]}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # pyarrow's names no file
        return os.strerror(errno.ENOSPC)
    if "allocate shared memory" in str(error):  # a RuntimeError of PyTorch
        return first_line(error)
    if (line := explain_hidden_module()) is not None:
        return line
    if isinstance(error, ImportError) and (others := compare_versions(read_requirements())):
        return f"{', '.join(others.values())}; {INSTALL_ALL} ({first_line(error)})"
    if isinstance(error, ValueError) and (line := _explain_variable(error)) is not None:
        return line
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    where = f" in '{frames[-1].filename}', line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {first_line(error, limit=None)} (--debug shows where)"


def _explain_variable(error: ValueError) -> str | None:
    """Return one line that names the variable of the environment whose value a library refuses."""
    for name, value in os.environ.items():
        # What libraries read has an underscore, as HF_HOME, and what shells set has none, as USER
        if "_" in name and len(value) > 1 and f"'{value}'" in str(error):
            return f"the environment has {name}={value} ({first_line(error)}); correct it, or unset {name}"
    return None


def report(error: Exception) -> int:
    """Print one line for an error to stderr, and a hint if one is known; return the exit code."""
    message = describe(error)
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}", file=sys.stderr)
    if (hint := next_hint(message)) is not None:
        print(hint, file=sys.stderr)
    return TEMPORARY if is_temporary(error) else 1


def is_temporary(error: Exception) -> bool:
    """Whether an error may pass by itself: a TemporaryError, or one that `open_session` has marked."""
    return getattr(error, "retryable", False)


def report_uncaught_errors() -> None:
    """Let a program that ends with a UserError print one line, as the scripts do. Other errors show a traceback."""
    show = sys.excepthook
    sys.excepthook = lambda kind, *error: (
        sys.exit(report(error[0])) if issubclass(kind, PeerError) or is_temporary(error[0]) else show(kind, *error)
    )


class LastingFile(io.FileIO):
    """Standard output or error of a script that may outlive its reader: a terminal, or `tee` after Ctrl-C.

    What cannot be written is dropped. On stdout a full disk is an error.
    """

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 1 and error.errno not in (errno.EPIPE, errno.EIO):
                raise OSError(*error.args, "standard output") from None
            return len(data)


def _keep_writing(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return standard output or error with a LastingFile. A closed one, as after 2>&-, becomes /dev/null."""
    if stream not in (sys.__stdout__, sys.__stderr__):
        return stream  # of a notebook, or of a test
    try:
        os.fstat(descriptor)
    except OSError:  # otherwise the next file to be opened would get this number, and the messages
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    encoding = None if stream is None else stream.encoding
    file = io.BufferedWriter(LastingFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)


def announce_imports() -> None:
    """Print once, before PyTorch is imported, that the script loads libraries, and which have untested versions.

    They take 5 CPU seconds, a minute beside ten busy processes, and minutes from a cold disk.
    """
    if "torch" not in sys.modules and _first_word.acquire(blocking=False):
        name = Path(sys.argv[0]).name
        print(f"{name}: loading PyTorch and other libraries (seconds; on a busy machine a minute)", file=sys.stderr)
        others = compare_versions(read_requirements())
        others.pop("torch", None)  # it may have been chosen for the driver
        if text := ", ".join(others.values()):
            print(f"{name}: warning: {text}, which were not tested together; {INSTALL_ALL}", file=sys.stderr)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main`; on an exception print one line to stderr, and a hint if one is known, and exit.

    The exit code is 1, TEMPORARY, or 130 after Ctrl-C. --debug also prints the traceback.
    """
    # In a locale that is not UTF-8: start again in Python's UTF-8 mode, for names of files, libraries and processes.
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})
    if "NO_COLOR" in os.environ:
        os.environ.setdefault("HIVEMIND_COLORS", "false")  # read when hivemind is imported
    sys.stdout, sys.stderr = _keep_writing(sys.stdout, 1), _keep_writing(sys.stderr, 2)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: an exception, which removes temporary files
        if signal.getsignal(number) == signal.SIG_DFL:  # of nohup, SIGHUP is ignored
            signal.signal(number, signal.default_int_handler)
    timer = threading.Timer(FIRST_WORD_SECONDS, announce_imports)
    timer.daemon = True
    timer.start()
    try:
        main()
        return sys.stdout.flush()
    except KeyboardInterrupt:
        report(UserError("interrupted"))
        code = 130
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        code = report(error)
    sys.exit(code)
