"""Network: where the processes of a scene find each other. Plainly that is loopback; with links each worker has a
network namespace of its own, and one link to the hub, where the router and all wires are.

Links take a network that is ours: `unshare -rn emberline chaos --links`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port

HERE = "127.0.0.1"
THERE = "127.0.0.2"  # the hub, where there are no links
HUB = "10.77.0.1"
FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
SLOW = ("rate", "160kbit", "burst", "4kb", "latency", "2s")
MUTE = ("rate", "8bit", "burst", "1b", "limit", "1b")  # no packet is that small: all are lost

Harm = Literal["down", "mute", "slow"]


@dataclass(frozen=True, slots=True)
class Link:
    device: str  # the hub's end
    host: str  # the worker's address
    holder: subprocess.Popen[bytes] = field(repr=False)  # keeps the namespace while its worker is dead

    @property
    def inside(self) -> tuple[str, ...]:
        """In front of a program that is to run at its far end."""
        return ("nsenter", f"--net=/proc/{self.holder.pid}/ns/net")

    def harm(self, how: Harm) -> None:
        if how == "down":
            _ip("link", "set", self.device, "down")
        else:
            _run("tc", "qdisc", "add", "dev", self.device, "root", "tbf", *(SLOW if how == "slow" else MUTE))

    def mend(self) -> None:
        _run("tc", "qdisc", "del", "dev", self.device, "root", well=False)
        _ip("link", "set", self.device, "up")
        _ip("route", "replace", self.host, "dev", self.device)  # it went with the link


class Network:
    def __init__(self, *, links: bool) -> None:
        self.hub = HUB if links else THERE
        self._links: list[Link] | None = [] if links else None
        if links:
            _ip("link", "set", "lo", "up")
            _ip("address", "add", HUB, "dev", "lo")
            FORWARD.write_text("1\n")  # workers exchange what the store holds

    def join(self) -> Link | None:
        """One more worker; None: it is here, as all are."""
        if self._links is None:
            return None
        number = len(self._links) + 1
        command = ["unshare", "-n", "sh", "-c", "echo; exec cat"]  # which ends with us: we hold its stdin
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdout is not None
        holder.stdout.readline()  # now it has a namespace
        link = Link(f"ember{number}", f"10.77.1.{number}", holder)
        self._links.append(link)
        _ip("link", "add", link.device, "type", "veth", "peer", "name", "up0", "netns", str(holder.pid))
        for inside in (("lo",), ("up0",)):
            _run(*link.inside, "ip", "link", "set", *inside, "up")
        _run(*link.inside, "ip", "address", "add", f"{link.host}/32", "dev", "up0")
        _run(*link.inside, "ip", "route", "add", "default", "dev", "up0", "src", link.host)
        link.mend()
        Path(f"/proc/sys/net/ipv4/conf/{link.device}/proxy_arp").write_text("1\n")  # the hub is the way to everybody
        return link

    def free_port(self) -> int:
        """Where workers listen, and at the hub."""
        return free_port(HERE, self.hub)

    def close(self) -> None:
        for link in self._links or ():
            link.holder.kill()
            link.holder.wait()


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str, well: bool = True) -> None:
    """`well`: it must succeed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise EmberlineError(f"{command[0]} does not work: {e}") from e
    if well and done.returncode != 0:
        hint = "links take a network that is ours: unshare -rn emberline chaos --links"
        raise EmberlineError(f"{' '.join(command)}: {done.stderr.strip()}", hint=hint)
