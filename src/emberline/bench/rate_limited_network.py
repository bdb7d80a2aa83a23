"""rate_limited_network: two network namespaces that are connected by a link of limited bandwidth.

The limit holds for data that the remote namespace sends.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NEAR, FAR = "10.211.77.1", "10.211.77.2"
CLONE_NEWNET = 0x40000000
BURST, LATENCY = "1mb", "20ms"  # size of the token bucket, and how long packets may queue


class NamespacesUnavailable(Exception):
    """Network namespaces cannot be created. They need root and support by the kernel."""


@dataclass(frozen=True, slots=True)
class RemoteNamespace:
    """The remote network namespace. A process that calls `enter` sends at the limited rate."""

    name: str
    link: str = ""  # this side's end of the link
    host: str = FAR

    def enter(self) -> None:
        """Move the calling thread into the namespace. Sockets that it creates afterwards belong to the namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        handle = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            if libc.setns(handle, CLONE_NEWNET):
                raise NamespacesUnavailable(os.strerror(ctypes.get_errno()))
        finally:
            os.close(handle)

    def set_link(self, state: str) -> None:
        """Cut the link (`down`), or repair it (`up`). Both ends keep their addresses and connections."""
        _run_command("ip", "link", "set", self.link, state)


@contextmanager
def rate_limited_network(rate_gbit: float) -> Iterator[RemoteNamespace]:
    name = f"ember{os.getpid()}"
    near, far = f"{name}a", f"{name}b"
    try:
        _run_command("ip", "netns", "add", name)
        _run_command("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _run_command("ip", "addr", "add", f"{NEAR}/30", "dev", near)
        _run_command("ip", "link", "set", near, "up")
        _run_command("ip", "-n", name, "addr", "add", f"{FAR}/30", "dev", far)
        _run_command("ip", "-n", name, "link", "set", far, "up")
        rate = f"{rate_gbit * 1000:g}mbit"
        _run_command(
            "tc", "-n", name, "qdisc", "add", "dev", far, "root", "tbf", "rate", rate, "burst", BURST,
            "latency", LATENCY,
        )  # fmt: skip
        _run_command("ip", "-n", name, "link", "set", "lo", "up")
        yield RemoteNamespace(name, near)
    finally:
        for undo in (("ip", "link", "del", near), ("ip", "netns", "del", name)):
            subprocess.run(undo, capture_output=True, check=False, timeout=10)


def _run_command(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or error
        raise NamespacesUnavailable(f"command `{' '.join(command[:3])}` failed: {str(output).strip()}") from error
