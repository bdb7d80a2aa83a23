"""ChaosNetwork: the network addresses of a cluster's processes.

By default all processes use the loopback address. With `--links`, each worker runs in its own Linux network namespace,
and one virtual link connects it to the hub, the namespace of the router and of all proxies. Creating links needs a
private network namespace: `unshare -rn emberline chaos --links`."""

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
    def namespace_command_prefix(self) -> tuple[str, ...]:
        """The arguments to put before a command to run it in the worker's network namespace."""
        return ("nsenter", f"--net=/proc/{self.namespace_process.pid}/ns/net")

    def apply_disturbance(self, disturbance: LinkDisturbance) -> None:
        if disturbance == "down":
            _run_ip_command("link", "set", self.device, "down")
        else:
            _run_command(
                "tc",
                "qdisc",
                "add",
                "dev",
                self.device,
                "root",
                "tbf",
                *(SLOW_TBF_OPTIONS if disturbance == "slow" else DROP_ALL_TBF_OPTIONS),
            )

    def end_disturbance(self) -> None:
        _run_command("tc", "qdisc", "del", "dev", self.device, "root", must_succeed=False)
        _run_ip_command("link", "set", self.device, "up")
        _run_ip_command("route", "replace", self.host, "dev", self.device)  # taking the link down removed the route


class ChaosNetwork:
    def __init__(self, *, links: bool) -> None:
        self.hub = HUB_ADDRESS if links else HUB_LOOPBACK_ADDRESS
        self._links: list[NetworkLink] | None = [] if links else None
        if links:
            _run_ip_command("link", "set", "lo", "up")
            _run_ip_command("address", "add", HUB_ADDRESS, "dev", "lo")
            IP_FORWARD_FILE.write_text("1\n")  # workers exchange the store's blocks directly

    def add_worker_link(self) -> NetworkLink | None:
        """Create the network link of a new worker and return it. Return None if the cluster runs without links."""
        if self._links is None:
            return None
        number = len(self._links) + 1
        command = ["unshare", "-n", "sh", "-c", "echo; exec cat"]  # ends with this process, which holds its stdin
        namespace_process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert namespace_process.stdout is not None
        namespace_process.stdout.readline()  # the namespace exists now
        link = NetworkLink(f"ember{number}", f"10.77.1.{number}", namespace_process)
        self._links.append(link)
        _run_ip_command(
            "link", "add", link.device, "type", "veth", "peer", "name", "up0", "netns", str(namespace_process.pid)
        )
        for interface in (("lo",), ("up0",)):
            _run_command(*link.namespace_command_prefix, "ip", "link", "set", *interface, "up")
        _run_command(*link.namespace_command_prefix, "ip", "address", "add", f"{link.host}/32", "dev", "up0")
        _run_command(*link.namespace_command_prefix, "ip", "route", "add", "default", "dev", "up0", "src", link.host)
        link.end_disturbance()
        Path(f"/proc/sys/net/ipv4/conf/{link.device}/proxy_arp").write_text("1\n")  # the hub routes between workers
        return link

    def find_free_port(self) -> int:
        """Return a port that is free on the loopback address and on the hub's address."""
        return free_port(LOOPBACK_ADDRESS, self.hub)

    def close(self) -> None:
        for link in self._links or ():
            link.namespace_process.kill()
            link.namespace_process.wait()


def _run_ip_command(*arguments: str) -> None:
    _run_command("ip", *arguments)


def _run_command(*command: str, must_succeed: bool = True) -> None:
    """Run a command. Raises EmberlineError if the program cannot be started.

    With `must_succeed`, a nonzero exit status raises EmberlineError as well."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise EmberlineError(f"cannot run {command[0]}: {e}", hint=f"install {command[0]}") from e
    if must_succeed and completed.returncode != 0:
        hint = "--links needs a private network: unshare -rn emberline chaos --links"
        raise EmberlineError(f"{' '.join(command)} failed: {completed.stderr.strip()}", hint=hint)
