"""Describes the machine and the software on which a result was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import emberline
from emberline.core.cpus import core_count

ARM_FLAGS = ("asimd", "asimdhp", "asimddp", "sve", "sve2", "i8mm", "bf16")  # each list from the oldest to the newest
X86_FLAGS = ("fma", "avx2", "avx512f", "avx512_vnni", "avx512_fp16", "avx512_bf16", "amx_int8", "amx_bf16")
NATIVE_BF16 = {"bf16", "avx512_bf16", "amx_bf16"}
HERE = Path(__file__).resolve()
PACKAGES = ("torch", "numpy", "msgspec", "httptools")


def describe_hardware() -> dict[str, Any]:
    cpu = _read_lscpu()
    flags = set(cpu.get("Flags", "").split())
    return {
        "machine": platform.machine(),
        "cpu": cpu.get("Model name", "unknown"),
        "cores": core_count(),
        "llc_mib": round(last_level_cache_bytes() / 2**20, 1),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "flags": [flag for flag in ARM_FLAGS + X86_FLAGS if flag in flags],
    }


def describe_software() -> dict[str, str]:
    found = {"emberline": emberline.__version__, "python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def describe_commit(stated_commit: str | None = None, source_file: Path = HERE) -> str:
    """Return the commit of this checkout. A checkout with uncommitted changes is marked with "-dirty".

    `stated_commit` is used instead if the user gave it, for a copy of the code without a repository; it is marked with
    "(stated)".
    """
    if stated_commit is not None:
        return f"{stated_commit} (stated)"
    git = ("git", "-C", str(source_file.parent))
    if not _command_output(*git, "ls-files", "--", source_file.name):  # the enclosing repository may be another one
        return "none"
    head = _command_output(*git, "rev-parse", "--short=12", "HEAD")
    changes = _command_output(*git, "status", "--porcelain")
    return "none" if not head else head if changes == "" else f"{head}-dirty"


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of the first CPU core, or 0 if it is unknown."""
    units = {"K": 1 << 10, "M": 1 << 20}
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


def _read_lscpu() -> dict[str, str]:
    lines = (_command_output("lscpu") or "").splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _command_output(*command: str) -> str | None:
    """Return the output of a command, or None if the command is not installed or failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
