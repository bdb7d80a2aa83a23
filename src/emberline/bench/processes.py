"""Processes of a server on this machine, found by its port, and what they use. From /proc; nothing on other systems."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    cpu: float  # seconds, user and system, since its start
    rss: int  # bytes
    waited: float = 0.0  # seconds in which it could have run, had a core been free


def listener(port: int) -> int | None:
    """The process that listens on a TCP port."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                return int(process.name)
    return None


def process_tree(pid: int) -> dict[str, int]:
    """The process as `server` and its children by the module that they run."""
    found = {"server": pid}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if parent(int(process.name)) == pid:
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                name = words[words.index("-m") + 1].removeprefix("emberline.") if "-m" in words else Path(words[0]).name
                found[name if name not in found else f"{name}-{process.name}"] = int(process.name)
    return found


def parent(pid: int) -> int | None:
    try:
        return int(_stat(pid)[1])
    except OSError:
        return None


def usage(pid: int) -> ProcessUsage | None:
    try:
        stat = _stat(pid)
    except OSError:
        return None
    ticks = int(stat[11]) + int(stat[12])
    return ProcessUsage(
        ticks / os.sysconf("SC_CLK_TCK"), int(stat[21]) * os.sysconf("SC_PAGE_SIZE"), _wait_seconds(pid)
    )


def _wait_seconds(pid: int) -> float:
    """Of its first thread; zero where the kernel does not count it."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def busy_cores(seconds: float) -> float:
    """Waits, and says how many cores were busy meanwhile, whoever used them."""
    if not (PROC / "stat").exists():
        time.sleep(seconds)
        return os.getloadavg()[0]  # macOS: of the last minute
    before = idle_seconds()
    began = time.perf_counter()
    time.sleep(seconds)
    idle = (idle_seconds() - before) / (time.perf_counter() - began)
    return max(0.0, (os.cpu_count() or 1) - idle)


def idle_seconds() -> float:
    """Of all cores together, waiting for a disk included."""
    fields = (PROC / "stat").read_text().splitlines()[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on: the name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
