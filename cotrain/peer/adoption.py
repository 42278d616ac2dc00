"""How a peer finds the settings of a run, stated once by the organiser, and adopts them.

The monitor signs what its flags or its --run_config file state, and publishes it in the DHT under a key that names no
run. In a run without a monitor, the trainer that starts without --initial_peers does so. Every trainer publishes the
signed text again. A newcomer reads all of these texts. It trusts an organiser that is one of its --initial_peers;
otherwise one that an initial peer vouches for.
"""

import ipaddress
import shlex
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from cotrain.common.argument_parser import CommandLine
from cotrain.common.errors import TemporaryError, UserError, require_packages
from cotrain.common.flags import check_maddr
from cotrain.common.logs import setup_logging
from cotrain.common.signals import StopSignal, ignore_launcher
from cotrain.dht.run_records import record_schemas
from cotrain.models.config import to_published_model
from cotrain.options import NOTHING, Adopted, PeerOptions, TrainerOptions
from cotrain.peer.addresses import peer_id_in
from cotrain.peer.peer import find_own_id, start_peer
from cotrain.peer.signed_settings import (
    COMMON_SETTINGS,
    KEY,
    OPTIONAL_SETTINGS,
    TASK,
    RunConfig,
    check_safe,
    choose,
    find_kept_file,
)
from peerstep.peer.processes import guard_children
from peerstep.reports.progress_report import PROTOCOL
from peerstep.reports.records import get_dictionary

logger = get_logger(__name__)


@dataclass(frozen=True)
class Entry:
    """How a script enters a run.

    :ivar arguments: those of the script, with the settings of the run
    :ivar adopted: which of these the run has chosen
    :ivar config: the settings of the run; None if there are none, or this peer states them
    :ivar is_organiser: whether this peer signs its settings
    :ivar is_alone: whether no initial peer answers
    """

    arguments: tuple
    adopted: Adopted = NOTHING
    config: RunConfig | None = None
    is_organiser: bool = False
    is_alone: bool = False

    def to_options(self) -> TrainerOptions:
        """Return the arguments of a trainer's script."""
        return TrainerOptions._make((*self.arguments, self.adopted))


def find_run_config(command_line: CommandLine, stop: StopSignal, is_monitor: bool = False) -> Entry:
    """Find the settings of the run that --initial_peers lead to, if there are any.

    The settings are kept in the output folder: after a restart, other peers than the initial ones may relay them. The
    call also prepares the process of the script: its log, its environment and its children.

    :param is_monitor: start even if no initial peer answers, and state settings if this is the organiser
    :raises UserError: if a flag differs from the settings, these are not safe, or a package is not installed
    :raises TemporaryError: if there are none, and the command line does not state the run either
    """
    ignore_launcher()
    guard_children()
    require_packages(command_line.arguments)
    (peer_args,) = [args for args in command_line.arguments if isinstance(args, PeerOptions)]
    setup_logging(peer_args.debug)
    if not peer_args.initial_peers:
        return Entry(command_line.arguments, is_organiser=True)
    stated, run_id = command_line.stated, command_line.values.get("run_id")
    path = find_kept_file(command_line.arguments)
    kept = RunConfig.load(path)
    if kept is not None and run_id not in (None, kept.settings["run_id"]):
        kept = None  # the folder was that of another run
    organiser = None if kept is None else kept.organiser
    config = fault = None
    try:
        config = visit_run(peer_args, organiser, run_id, stop)
    except TemporaryError as error:
        fault = error
    if config is None and is_monitor and kept is not None:
        # Only if these peers had them: others may be of another run.
        config = kept if {organiser, kept.publisher} & set(map(peer_id_in, peer_args.initial_peers)) else None
    if fault is not None:
        if not is_monitor or (config is None and not stated & COMMON_SETTINGS):
            raise fault
        logger.warning(f"{fault}. Starting without them, and dialing them again periodically")
    elif config is None:
        if kept is not None and not is_monitor:
            raise TemporaryError(f"no peer has the settings that organiser {organiser} stated; is a trainer running?")
        if "run_id" not in stated:
            raise TemporaryError(
                "the initial peers publish no settings of a run; try again later, or pass --run_id and all others"
            )
        logger.info("The initial peers publish no settings of a run: using the command line's settings")
    is_organiser = is_monitor and config is not None and config.organiser == find_own_id(peer_args, path.parent)
    if config is None or (is_organiser and stated & COMMON_SETTINGS):
        is_organiser |= fault is not None or "run_config" in stated
        return Entry(command_line.arguments, is_organiser=is_organiser, is_alone=fault is not None)
    arguments, adopted = _take(config, command_line, peer_args.initial_peers)
    config.keep(path)
    if kept is not None and organiser != config.organiser and kept.settings["run_id"] == config.settings["run_id"]:
        logger.warning(f"The organiser has changed: it was {organiser}, and is {config.organiser} now")
    vouched = "" if config.organiser in (config.publisher, organiser) else f", vouched for by {config.publisher}"
    logger.info(f"Joining run {config.settings['run_id']} of organiser {config.organiser}{vouched}")
    return Entry(arguments, adopted, config, is_alone=fault is not None)


def _take(config: RunConfig, command_line: CommandLine, initial_peers: Iterable[str]) -> tuple[tuple, Adopted]:
    """Return the arguments of a command line with the settings of a run, and which of these it lacked."""
    if config.protocol != PROTOCOL:
        raise UserError(
            f"the run has protocol {config.protocol}, this checkout {PROTOCOL}: use the organiser's version"
        )
    adopted = {name: value for name, value in config.settings.items() if name not in command_line.stated}
    if adopted.get("model_name_or_path", "") is None and not _has_no_model(command_line.arguments):
        raise UserError(
            "this run starts from weights in a folder of the organiser: ask for it, and pass --model_name_or_path"
        )
    arguments = command_line.with_settings(adopted)
    check_safe(adopted)
    refuse_differences(config, arguments)
    maddrs = [check_maddr("--initial_peers", maddr) for maddr in initial_peers]
    near = [ipaddress.ip_address(maddr[name]) for maddr in maddrs for name in ("ip4", "ip6") if name in maddr]
    return arguments, Adopted(frozenset(adopted), tuple(near))


def _has_no_model(arguments: Iterable[object]) -> bool:
    """Whether the arguments are those of a monitor without checkpoints."""
    return not all(getattr(args, "store_checkpoints", True) for args in arguments)


def visit_run(args: PeerOptions, organiser: PeerID | None, run_id: str | None, stop: StopSignal) -> RunConfig | None:
    """Join the run for a moment, with a new identity, and return its configuration."""
    with tempfile.TemporaryDirectory() as folder, stop.deferred():
        visitor = replace(
            args,
            identity_path=None,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            announce_maddrs=[],
            announce_tunnel=None,
            use_auto_relay=False,  # takes four seconds more
            trusted_relays=[],
        )
        with start_peer(
            visitor, record_schemas(visitor.run_id), Path(folder) / "identity.key", True, stop.event
        ) as peer:
            records = {subkey: record.value for subkey, record in get_dictionary(peer.dht, KEY).items()}
            return choose(records, set(map(peer_id_in, args.initial_peers)), organiser, run_id)


def refuse_differences(config: RunConfig, arguments: Iterable[Any]) -> None:
    """Raise UserError if a peer's arguments differ from the settings of the run. None differs from no value."""
    run_id, expected = config.settings["run_id"], config.settings.get(TASK)
    for args in arguments if not _has_no_model(arguments) else ():
        own = getattr(args, TASK, expected)
        if own != expected and expected is None:
            raise UserError(f"--task: run {run_id} trains a language model, without a task of its own: drop the flag")
        if own != expected:
            fault = "--task is missing" if own is None else f"--task: '{args.task}' is another version, SHA-256 {own}"
            remedy = "ask the organiser for the file, read it, and pass --task FILE"
            raise UserError(f"{fault}; run {run_id} has the task with SHA-256 {expected}: {remedy}")
    for args, (name, value) in product(arguments, config.settings.items()):
        own = getattr(args, name, None)
        if own in (None, value) or value is None or name in {TASK, *OPTIONAL_SETTINGS}:
            continue
        if name != "model_name_or_path" or to_published_model(own) != value:
            raise UserError(
                f"--{name} is {own} here and {value} in run {run_id}: drop the flag, or pass "
                f"--{name} {shlex.quote(str(value))}"
            )
