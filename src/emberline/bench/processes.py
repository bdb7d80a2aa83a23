"""Finds the processes of a server by its port, and reads their CPU time and memory from /proc (Linux only)."""

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
    waited: float = 0.0  # seconds in which it was ready to run but had no core


def find_listener_pid(port: int) -> int | None:
    """Return the pid of the process that listens on a TCP port, or None if no process does."""
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


def find_process_tree(pid: int) -> dict[str, int]:
    """Return the pids of a process and its children, by name.

    The process itself is named `server`, and a child by the Python module that it runs.
    """
    found = {"server": pid}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if find_parent_pid(int(process.name)) == pid:
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                name = words[words.index("-m") + 1].removeprefix("emberline.") if "-m" in words else Path(words[0]).name
                found[name if name not in found else f"{name}-{process.name}"] = int(process.name)
    return found


def find_parent_pid(pid: int) -> int | None:
    try:
        return int(_read_stat(pid)[1])
    except OSError:
        return None


def read_usage(pid: int) -> ProcessUsage | None:
    try:
        stat = _read_stat(pid)
    except OSError:
        return None
    ticks = int(stat[11]) + int(stat[12])
    return ProcessUsage(
        ticks / os.sysconf("SC_CLK_TCK"), int(stat[21]) * os.sysconf("SC_PAGE_SIZE"), _read_core_wait_seconds(pid)
    )


def _read_core_wait_seconds(pid: int) -> float:
    """Return for how many seconds the main thread was ready to run but had no CPU core.

    Return 0 if the kernel does not count this.
    """
    with contextlib.suppress(OSError):
        return read_thread_seconds(pid)[1]
    return 0.0


def read_thread_seconds(thread_id: int) -> tuple[float, float]:
    """Return for how long a thread ran, and for how long it was ready to run but had no CPU core.

    The id of a process is that of its main thread. Raises OSError if the kernel does not count this."""
    ran, waited, _ = Path(f"/proc/{thread_id}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def measure_busy_cores(seconds: float) -> float:
    """Wait for `seconds` and return how many cores were busy on average in that time, with any process."""
    if not (PROC / "stat").exists():
        time.sleep(seconds)
        return os.getloadavg()[0]  # macOS: average of the last minute
    before = total_idle_seconds()
    began = time.perf_counter()
    time.sleep(seconds)
    idle = (total_idle_seconds() - before) / (time.perf_counter() - began)
    return max(0.0, (os.cpu_count() or 1) - idle)


def total_idle_seconds() -> float:
    """Return the idle time of all cores together since the system started, including waits for disks."""
    fields = (PROC / "stat").read_text().splitlines()[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def total_stolen_seconds() -> float:
    """Return the time in which the host of this virtual machine gave its cores to others, since the system started."""
    if not (PROC / "stat").exists():
        return 0.0
    return int((PROC / "stat").read_text().splitlines()[0].split()[8]) / os.sysconf("SC_CLK_TCK")


def total_foreign_seconds() -> float:
    """Return the CPU seconds since the system started that this process and its descendants could not use.

    They were used by other processes, by ended children of these, or by the host's other virtual machines. Return 0 on
    systems without /proc.
    """
    if not PROC.exists():
        return 0.0
    stats = {}
    for process in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stats[int(process.name)] = _read_stat(int(process.name))
    ours, found = set[int](), {os.getpid()}
    while found:
        ours |= found
        found = {pid for pid, fields in stats.items() if int(fields[1]) in found} - ours
    ticks = sum(int(ticks) for pid, fields in stats.items() if pid not in ours for ticks in fields[11:15])
    return total_stolen_seconds() + ticks / os.sysconf("SC_CLK_TCK")


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name, which may contain spaces."""
    return (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
