"""trackio's own server for --serve_page, which shows the curves without an account."""

import contextlib
import logging
import os
import re
import subprocess
import sys
from urllib.parse import quote

import psutil

from cotrain.common.flags import is_page, require
from cotrain.monitoring.trackers import ADDRESS
from cotrain.peer.addresses import choose_maddrs
from peerstep.local_peer import LocalPeer
from peerstep.peer.processes import leave_with_parent

logger = logging.getLogger(__name__)

# trackio's server answers any caller and does not limit the length of a request. In trials one SQL query blocked the
# page for all readers, and another one took 2.8 GB. The page itself sends no SQL and takes 0.2 GB. Only Linux enforces
# the limit.
SERVE = """import resource, sys, trackio.server
del trackio.server.SQLiteStorage.query_project
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_DATA, (2**31, 2**31))
trackio.show(host=sys.argv[1], server_port=int(sys.argv[2]), open_browser=False, share=False)"""
SECRET = re.compile("TOKEN|KEY|SECRET|PASSW")  # in names of variables that the server, which strangers reach, lacks


class PageServer:
    """Keeps trackio's server for the folder TRACKIO_DIR running, in a child process that ends with this one.

    Whoever has its write token may change the curves: that of TRACKIO_WRITE_TOKEN, or a random one of trackio. trackio
    prints a link with it: what the child prints is dropped. It has a low priority, since strangers may ask for much.

    :param address: of the page, for people
    """

    def __init__(self, endpoint: str, address: str):
        self.host, _, self.port = endpoint.rpartition(":")
        self.address = address
        self.process: subprocess.Popen | None = None
        self._page: str | None = None  # the address, once the server has listened
        self._is_broken = False  # whether a warning says that it does not

    def check(self) -> str | None:
        """Start the server if it does not run, and return the address of the page once it has listened.

        Call this in the main thread, see `leave_with_parent`.
        """
        if self.process is None or (code := self.process.poll()) is not None:
            if self.process is not None and not self._is_broken:
                self._is_broken, cause = True, f"with code {code}; another program may use port {self.port}"
                logger.warning(f"--serve_page: trackio's server has ended {cause}. Trying again")
            command = ["nice", sys.executable, "-c", SERVE, self.host.strip("[]"), self.port]
            null = subprocess.DEVNULL
            env = {name: x for name, x in os.environ.items() if "TRACKIO" in name or not SECRET.search(name)}
            self.process = subprocess.Popen(
                command, stdin=null, stdout=null, stderr=null, env=env, preexec_fn=leave_with_parent
            )
        elif (self._is_broken or self._page is None) and self._listens(self.process.pid):
            self._is_broken, self._page = False, self.address
            logger.info(f"Curves of the run: {self.address}")
        return self._page

    @staticmethod
    def _listens(pid: int) -> bool:
        with contextlib.suppress(psutil.Error):  # it has just ended
            return any(link.status == psutil.CONN_LISTEN for link in psutil.Process(pid).net_connections("tcp"))
        return False

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def find_address(endpoint: str, peer: LocalPeer) -> str:
    """Return the address of a page. At 0.0.0.0 it has the host that the peer announces, of IPv4 if there is one.

    :raises ArgumentsError: if trainers would refuse it, and not join
    """
    host, _, port = endpoint.rpartition(":")
    if host in ("0.0.0.0", "[::]"):
        hosts = [maddr.split("/")[2] for maddr in choose_maddrs(peer.dht.get_visible_maddrs())]
        host = min(hosts, key=lambda name: ":" in name)
    address = ADDRESS.format(host=f"http://{host}:{port}/", project=quote(peer.run_id))
    fault = f"--serve_page: trainers refuse '{address}', which is too long or of IPv6; pass an address with --page"
    require(is_page(address), fault)
    return address
