"""ChaosNetwork: the addresses of a cluster's processes.

By default all use loopback. With links, each worker has its own network namespace and one link to the hub, where the
router and all proxies are. Links need a private network: `unshare -rn emberline chaos --links`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port

LOOPBACK_ADDRESS = "127.0.0.1"
HUB_LOOPBACK_ADDRESS = "127.0.0.2"  # address of the hub without links
HUB_ADDRESS = "10.77.0.1"
IP_FORWARD_FILE = Path("/proc/sys/net/ipv4/ip_forward")
SLOW_TBF_OPTIONS = ("rate", "160kbit", "burst", "4kb", "latency", "2s")
# Every packet is larger than the burst, so all are dropped.
DROP_ALL_TBF_OPTIONS = (
    "rate",
    "8bit",
    "burst",
    "1b",
    "limit",
    "1b",
)

LinkDisturbance = Literal["down", "mute", "slow"]


@dataclass(frozen=True, slots=True)
class NetworkLink:
    device: str  # the hub's end of the link
    host: str  # the worker's address
    # Keeps the namespace alive while the worker restarts.
    namespace_process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def enter_command(self) -> tuple[str, ...]:
        """The command prefix that runs a program in the worker's namespace."""
        return ("nsenter", f"--net=/proc/{self.namespace_process.pid}/ns/net")

    def disturb(self, disturbance: LinkDisturbance) -> None:
        if disturbance == "down":
            _ip("link", "set", self.device, "down")
        else:
            _run(
                "tc",
                "qdisc",
                "add",
                "dev",
                self.device,
                "root",
                "tbf",
                *(SLOW_TBF_OPTIONS if disturbance == "slow" else DROP_ALL_TBF_OPTIONS),
            )

    def restore(self) -> None:
        _run("tc", "qdisc", "del", "dev", self.device, "root", must_succeed=False)
        _ip("link", "set", self.device, "up")
        _ip("route", "replace", self.host, "dev", self.device)  # taking the link down removed the route


class ChaosNetwork:
    def __init__(self, *, links: bool) -> None:
        self.hub = HUB_ADDRESS if links else HUB_LOOPBACK_ADDRESS
        self._links: list[NetworkLink] | None = [] if links else None
        if links:
            _ip("link", "set", "lo", "up")
            _ip("address", "add", HUB_ADDRESS, "dev", "lo")
            IP_FORWARD_FILE.write_text("1\n")  # workers exchange the store's blocks directly

    def add_worker_link(self) -> NetworkLink | None:
        """Add a worker's link; None without links."""
        if self._links is None:
            return None
        number = len(self._links) + 1
        command = ["unshare", "-n", "sh", "-c", "echo; exec cat"]  # ends with this process, which holds its stdin
        namespace_process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert namespace_process.stdout is not None
        namespace_process.stdout.readline()  # the namespace exists now
        link = NetworkLink(f"ember{number}", f"10.77.1.{number}", namespace_process)
        self._links.append(link)
        _ip("link", "add", link.device, "type", "veth", "peer", "name", "up0", "netns", str(namespace_process.pid))
        for interface in (("lo",), ("up0",)):
            _run(*link.enter_command, "ip", "link", "set", *interface, "up")
        _run(*link.enter_command, "ip", "address", "add", f"{link.host}/32", "dev", "up0")
        _run(*link.enter_command, "ip", "route", "add", "default", "dev", "up0", "src", link.host)
        link.restore()
        Path(f"/proc/sys/net/ipv4/conf/{link.device}/proxy_arp").write_text("1\n")  # the hub routes between workers
        return link

    def free_port(self) -> int:
        """Return a port that is free on the workers' loopback address and on the hub."""
        return free_port(LOOPBACK_ADDRESS, self.hub)

    def close(self) -> None:
        for link in self._links or ():
            link.namespace_process.kill()
            link.namespace_process.wait()


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str, must_succeed: bool = True) -> None:
    """Run a command; raise EmberlineError if it cannot be run or, with `must_succeed`, fails."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise EmberlineError(f"cannot run {command[0]}: {e}", hint=f"install {command[0]}") from e
    if must_succeed and completed.returncode != 0:
        hint = "--links needs a private network: unshare -rn emberline chaos --links"
        raise EmberlineError(f"{' '.join(command)} failed: {completed.stderr.strip()}", hint=hint)
