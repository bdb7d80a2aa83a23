"""What may still be taken: the machine's word, or that of the container if it is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberline.core import freememory
from emberline.core.freememory import free_memory


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n"}
V2 = {
    "sys/fs/cgroup/memory.max": "3000000\n",
    "sys/fs/cgroup/memory.current": "2500000\n",
    "sys/fs/cgroup/memory.stat": "file 900000\nactive_file 100000\ninactive_file 50000\n",
}
V1 = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1900000\n",
    "sys/fs/cgroup/memory/memory.stat": "active_file 1\ntotal_active_file 3000\ntotal_inactive_file 4000\n",
}


JOB_V2 = {
    "proc/self/cgroup": "0::/jobs/job7/step\n",
    **{name.replace("cgroup/", "cgroup/jobs/job7/"): text for name, text in V2.items()},
    "sys/fs/cgroup/jobs/job7/step/memory.max": "max\n",
}
JOB_V1 = {
    "proc/self/cgroup": "9:cpu,cpuacct:/jobs\n4:memory:/jobs/job7\n",
    **{name.replace("memory/", "memory/jobs/job7/"): text for name, text in V1.items()},
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (MACHINE, 4_096_000),
        (MACHINE | V2, 650_000),
        (MACHINE | V1, 107_000),
        (MACHINE | V2 | {"sys/fs/cgroup/memory.max": "max\n"}, 4_096_000),
        (MACHINE | V2 | {"sys/fs/cgroup/memory.current": "9000000\n"}, 0),
        (V2, 650_000),
        (MACHINE | JOB_V2, 650_000),
        (MACHINE | JOB_V1, 107_000),
        ({}, 8_000_000),  # macOS has neither
    ],
)
def test_smallest_limit_counts(
    tmp_path: Path, files: dict[str, str], free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freememory, "physical_memory", lambda: 16_000_000)
    assert free_memory(write(tmp_path, files)) == free


def test_unknown_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    assert freememory.physical_memory() > 1 << 20
    monkeypatch.setattr(freememory.os, "sysconf", refuse)
    assert free_memory(tmp_path) == 0
