"""A small internet on this machine: public hosts, and homes behind routers with network address translation (NAT).

Each host is an unnamed network namespace that exists as long as its processes. Tests therefore cannot collide, nothing
is left when the processes end for any reason, and the machine's own network does not change.
"""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from peerstep.peer.processes import leave_with_parent
from tests.support.processes import namespace_prefix, wait_until

# libp2p treats the address ranges for documentation as private and does not use them for relays. These are public
# addresses of others, which is safe: no packet leaves the namespaces.
_NETWORK = "1.2.3"
_HOME_ADDRESS = "192.168.1.2"  # the same in each home, as with consumer routers
_ROUTER_ADDRESS = "192.168.1.1"
DELAYING_SWITCH = Path(__file__).with_name("delaying_switch.py")


def why_unavailable() -> str | None:
    """Return the reason why network namespaces are not available here; None if they are."""
    missing = [name for name in ("ip", "iptables", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found (packages iproute2, iptables, util-linux)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    command = ["unshare", "--net", "iptables", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8")
    if result.returncode != 0:
        return f"no network namespaces with NAT here: {' '.join(result.stderr.split())}"
    return None


class Host:
    """A host with its own network namespace. Its attribute `address` is empty behind a router.

    Its attribute `router` is the host that is connected to the switch: itself, or the router of its home.
    """

    def __init__(self):
        self.address, self.router = "", self
        machine = os.readlink("/proc/self/ns/net")
        self.holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=leave_with_parent)
        self.namespace = f"/proc/{self.holder.pid}/ns/net"
        try:
            wait_until(lambda: os.readlink(self.namespace) != machine, 120, "a network namespace")
            self.run("ip link set lo up")
            # The machine may use BBR, which ignores losses: through _limit it sent each byte 1.5 to 5 times. Home
            # computers use CUBIC. Reno is like it on slow lines, and is the only one that each machine allows here.
            self.run("sysctl --quiet --write net.ipv4.tcp_congestion_control=reno")
        except BaseException:
            self.close()
            raise

    def run(self, command: str) -> None:
        result = subprocess.run(
            [*namespace_prefix(self.namespace), *command.split()], capture_output=True, timeout=60, encoding="utf-8"
        )
        assert result.returncode == 0, f"{command}: {result.stderr}"

    def add_link(self, name: str, peer: "Host", peer_name: str) -> None:
        """Connect two hosts with a virtual cable."""
        self.run(f"ip link add {name} type veth peer name {peer_name} netns {peer.holder.pid}")
        self.run(f"ip link set {name} up")
        peer.run(f"ip link set {peer_name} up")

    def close(self) -> None:
        self.holder.kill()
        self.holder.wait()


def _limit(host: Host, interface: str, rate: float) -> None:
    """Limit what a host sends through an interface, in Mbit/s. The queue holds 100 ms, as with home routers."""
    host.run(f"tc qdisc replace dev {interface} root tbf rate {rate:g}mbit burst 64kb latency 100ms")


class Internet(ExitStack):
    """A network switch, to which hosts are added. At its end it closes them with their processes.

    :param latency: milliseconds from one host to another; `divide` has no effect with a latency
    """

    def __init__(self, latency: float = 0.0):
        super().__init__()
        self._switch, self._latency = self._new_host(), latency
        if latency:
            command = [*namespace_prefix(self._switch.namespace), sys.executable, str(DELAYING_SWITCH), str(latency)]
            delaying = subprocess.Popen(command, preexec_fn=leave_with_parent)
            self.callback(delaying.wait)
            self.callback(delaying.kill)
        for bridge in ("switch", "apart"):
            self._switch.run(f"ip link add {bridge} type bridge")
            self._switch.run(f"ip link set {bridge} up")
        self._ports: dict[str, str] = {}  # address -> interface of the switch

    def _new_host(self) -> Host:
        host = Host()
        self.callback(host.close)
        return host

    def _plug_in(self, host: Host) -> None:
        """Connect a host's interface "wan" to the switch, and give it an address."""
        number = len(self._ports) + 1
        name, host.address = f"port{number}", f"{_NETWORK}.{number}"
        self._ports[host.address] = name
        self._switch.add_link(name, host, "wan")
        if not self._latency:
            self._switch.run(f"ip link set {name} master switch")
        host.run(f"ip address add {host.address}/24 dev wan")

    def add_public(self) -> Host:
        """Add a host that all hosts can connect to."""
        host = self._new_host()
        self._plug_in(host)
        return host

    def limit(self, host: Host, upload: float, download: float) -> None:
        """Limit the rates of a host's connection to the switch, in Mbit/s."""
        _limit(host.router, "wan", upload)
        _limit(self._switch, self._ports[host.router.address], download)

    def divide(self, *hosts: Host) -> None:
        """Let these hosts reach only each other, and the other hosts, too, until the next call. None: no partition."""
        apart = {host.router.address for host in hosts}
        for address, port in self._ports.items():
            self._switch.run(f"ip link set {port} master {'apart' if address in apart else 'switch'}")

    def add_home(self) -> Host:
        """Add a host with a private address, behind a router.

        The router forwards outgoing connections and their answers, and drops incoming connections.
        """
        host, router = self._new_host(), self._new_host()
        host.router = router
        self._plug_in(router)
        router.add_link("lan", host, "eth0")
        router.run(f"ip address add {_ROUTER_ADDRESS}/24 dev lan")
        host.run(f"ip address add {_HOME_ADDRESS}/24 dev eth0")
        host.run(f"ip route add default via {_ROUTER_ADDRESS}")
        router.run("sysctl --quiet --write net.ipv4.ip_forward=1")
        router.run("iptables -t nat -A POSTROUTING -o wan -j MASQUERADE")
        for chain in ("INPUT", "FORWARD"):
            router.run(f"iptables -A {chain} -i wan -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")
            router.run(f"iptables -A {chain} -i wan -j DROP")
        return host
