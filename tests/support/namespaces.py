"""A small internet on this machine: public hosts, and homes behind routers that translate addresses (NAT).

Each host is a network namespace that lives as long as its processes: nothing has a name that another test could take,
nothing is left when they have ended, however that came about, and the machine's own network is not touched.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lib.common.processes import leave_with_parent
from tests.support.peers import wait_until

# libp2p counts the addresses that are reserved for documentation as private ones, which it does not use for relays.
# Nothing leaves the namespaces, so that somebody's real addresses do no harm.
_NETWORK = "1.2.3"
HOME_ADDRESS = "192.168.1.2"  # in each home, as with routers that people buy
_ROUTER_ADDRESS = "192.168.1.1"


def why_unavailable() -> str | None:
    """Why namespaces cannot be made here, or None if they can."""
    missing = [name for name in ("ip", "iptables", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found (packages iproute2, iptables, util-linux)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    command = ["unshare", "--net", "iptables", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        return f"no network namespaces with NAT here: {' '.join(result.stderr.split())}"
    return None


class Host:
    """A machine of its own, as far as the network goes."""

    def __init__(self):
        machine = os.readlink("/proc/self/ns/net")
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=leave_with_parent)
        self._processes = [self._holder]
        self.namespace = f"/proc/{self._holder.pid}/ns/net"
        try:
            wait_until(lambda: os.readlink(self.namespace) != machine, 30, "a network namespace")
            self.run("ip link set lo up")
        except BaseException:
            self.close()
            raise

    @property
    def enter(self) -> list[str]:
        """What to put before a command to run it on this host. The process keeps its id."""
        return ["nsenter", f"--net={self.namespace}", "--"]

    def run(self, command: str) -> None:
        result = subprocess.run([*self.enter, *command.split()], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"{command}: {result.stderr}"

    def add_link(self, name: str, peer: "Host", peer_name: str) -> None:
        """Put a cable between two hosts."""
        self.run(f"ip link add {name} type veth peer name {peer_name} netns {peer._holder.pid}")
        self.run(f"ip link set {name} up")
        peer.run(f"ip link set {peer_name} up")

    def listen(self, port: int) -> None:
        """Accept TCP connections from now on."""
        code = f"import socket\nserver = socket.create_server(('', {port}))\nwhile True: server.accept()[0].close()"
        command = [*self.enter, sys.executable, "-S", "-c", code]
        self._processes.append(subprocess.Popen(command, preexec_fn=leave_with_parent))
        wait_until(lambda: self.can_connect("127.0.0.1", port), 30, "a listening socket")

    def can_connect(self, address: str, port: int, timeout: float = 2) -> bool:
        """Whether a TCP connection can be made from here."""
        code = f"import socket\nsocket.create_connection(('{address}', {port}), timeout={timeout})"
        command = [*self.enter, sys.executable, "-S", "-c", code]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@dataclass
class Home:
    """A machine with a private address and the router that it reaches the others through."""

    host: Host
    router: Host
    public_address: str  # the router's


@dataclass
class Public:
    """A machine that everybody can connect to."""

    host: Host
    address: str


class Internet:
    """A switch that machines are plugged into as they come."""

    def __init__(self, stack: ExitStack):
        self._stack = stack
        self._switch = self._new_host()
        self._switch.run("ip link add switch type bridge")
        self._switch.run("ip link set switch up")
        self._num_links = 0

    def _new_host(self) -> Host:
        host = Host()
        self._stack.callback(host.close)
        return host

    def _plug_in(self, host: Host) -> str:
        """Connect a host through its interface "wan" and return the address that it gets."""
        self._num_links += 1
        name, address = f"port{self._num_links}", f"{_NETWORK}.{self._num_links}"
        self._switch.add_link(name, host, "wan")
        self._switch.run(f"ip link set {name} master switch")
        host.run(f"ip address add {address}/24 dev wan")
        return address

    def add_public(self) -> Public:
        host = self._new_host()
        return Public(host, self._plug_in(host))

    def add_home(self) -> Home:
        """Its router passes on what comes from the home, and what answers it; nothing else gets in."""
        host, router = self._new_host(), self._new_host()
        home = Home(host, router, self._plug_in(router))
        router.add_link("lan", host, "eth0")
        router.run(f"ip address add {_ROUTER_ADDRESS}/24 dev lan")
        host.run(f"ip address add {HOME_ADDRESS}/24 dev eth0")
        host.run(f"ip route add default via {_ROUTER_ADDRESS}")
        router.run("sysctl --quiet --write net.ipv4.ip_forward=1")
        router.run("iptables -t nat -A POSTROUTING -o wan -j MASQUERADE")
        for chain in ("INPUT", "FORWARD"):
            router.run(f"iptables -A {chain} -i wan -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")
            router.run(f"iptables -A {chain} -i wan -j DROP")
        return home


@contextmanager
def make_internet() -> Iterator[Internet]:
    """It is gone afterwards, with all that runs on its hosts."""
    with ExitStack() as stack:
        yield Internet(stack)
