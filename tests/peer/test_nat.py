"""The real scripts on separate hosts: public ones, and two behind NAT routers."""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from cotrain.training.checkpoints import list_checkpoints
from tests.support.namespaces import Host
from tests.support.peers import Script, Scripts, steps_of, wait_until

# Longer matchmaking than usual, since three peers share a machine. A complete group starts at once.
COLLABORATION = (
    "--run_id", "nat", *steps_of(seconds=10, num_trainers=3), "--matchmaking_time", 10,
    "--averaging_timeout", 60, "--average_state_every", 100, "--target_group_size", 3,
)  # fmt: skip


Peers = Callable[[Host], Scripts]


@pytest.fixture
def peers(internet, tmp_path, data, launcher) -> Iterator[Peers]:
    """Return a function that prepares scripts on a host."""
    with ExitStack() as stack:
        yield lambda host: stack.enter_context(closing(Scripts(tmp_path, data, host.namespace, launcher)))


def start_monitor(
    peers: Peers, public: Host, *flags: object, name: str = "monitor", port: str = "tcp/31337"
) -> Script:
    maddr = f"/ip4/{public.address}/{port}"
    flags = flags or ("--save_checkpoint_step_interval", 1)
    monitor = peers(public).monitor("--run_id", "nat", "--host_maddrs", maddr, *flags, name=name)
    assert monitor.address.startswith(maddr)
    return monitor


def start_trainer(peers: Peers, monitor: Script, host: Host, name: str, *flags: object) -> Script:
    """Start a trainer that listens on all addresses of its host and any port, the default."""
    return peers(host).trainer(
        name, "--initial_peers", monitor.address, "--host_maddrs", "/ip4/0.0.0.0/tcp/0", *COLLABORATION, *flags
    )


def count_complete_rounds(output: str, num_peers: int) -> int:
    """Count the rounds that received the gradients of all peers. hivemind warns about missing ones and continues."""
    results = re.findall(r"(received [\d.]+% )|Averaged gradients with (\d+) peers", output)
    return sum(
        number == str(num_peers) and not has_failed_before
        for (has_failed_before, _), (_, number) in itertools.pairwise([("", ""), *results])
    )


def wait_for_rounds(trainers: list[Script], number: int) -> None:
    """Wait until each trainer has averaged with all others several times."""

    def are_there() -> bool:
        for trainer in trainers:
            assert trainer.process.poll() is None, trainer.output
        return all(count_complete_rounds(trainer.output, len(trainers)) >= number for trainer in trainers)

    wait_until(are_there, 400, f"{number} complete rounds of {len(trainers)} peers")


def assert_watched(monitor: Script, num_trainers: int) -> None:
    """Assert that the monitor sees all trainers, and downloads the training state from one of them."""
    monitor.wait_for(rf"Step #\d+\tloss = \S+\talive peers = {num_trainers}\b", 120)
    monitor.wait_for(r"Saved \S+checkpoint-\d+", 120)
    assert list_checkpoints(monitor.log.parent / "monitor")


def test_clients_behind_nat_average_with_a_public_trainer(internet, peers):
    public = internet.add_public()
    monitor = start_monitor(peers, public)
    trainers = [
        start_trainer(peers, monitor, public, "public"),
        start_trainer(peers, monitor, internet.add_home(), "first", "--client_mode"),
        start_trainer(peers, monitor, internet.add_home(), "second", "--client_mode"),
    ]
    wait_for_rounds(trainers, 3)
    assert_watched(monitor, num_trainers=3)


@pytest.mark.long
def test_trainers_behind_nat_reach_each_other_through_the_monitor(internet, peers):
    """A relay forwards more than 128 KiB only after another public host has confirmed that the relay is public."""
    monitor = start_monitor(peers, internet.add_public())
    trainers = [
        start_trainer(peers, monitor, internet.add_public(), "public"),
        start_trainer(peers, monitor, internet.add_home(), "first", "--use_auto_relay"),
        start_trainer(peers, monitor, internet.add_home(), "second", "--use_auto_relay"),
    ]
    wait_for_rounds(trainers, 3)
    assert_watched(monitor, num_trainers=3)


@pytest.mark.long
@pytest.mark.parametrize("port", ["tcp/31337", "udp/31337/quic-v1"])
def test_trainers_behind_nat_connect_directly(internet, peers, port):
    """Four public peers, the number that libp2p asks for, tell the trainers the addresses of their routers."""
    hosts = [internet.add_public() for _ in range(4)]
    monitor = start_monitor(peers, hosts[0], "--no_store_checkpoints", port=port)
    joined = ("--no_store_checkpoints", "--initial_peers", monitor.address)
    others = [start_monitor(peers, host, *joined, name=f"on {host.address}", port=port) for host in hosts[1:]]
    addresses = [script.address for script in (monitor, *others)]
    any_port = f"/ip4/0.0.0.0/{port.replace('31337', '0')}"
    flags = ("--use_auto_relay", "--initial_peers", *addresses, "--host_maddrs", any_port)
    first = start_trainer(peers, monitor, internet.add_home(), "first", *flags)
    first.wait_for(r"Step #1\b")  # by then, the relays accept connections for it
    trainers = [first, start_trainer(peers, monitor, internet.add_home(), "second", *flags)]
    wait_for_rounds(trainers, 2)
    for public in hosts:
        public.run("ip link set wan down")
    wait_for_rounds(trainers, 2 + max(count_complete_rounds(trainer.output, 2) for trainer in trainers))
