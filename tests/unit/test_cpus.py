"""Limits of CPU time: the files of control groups, in both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from emberline.core import cpus

CASES: dict[str, tuple[str, dict[str, str], float | None]] = {
    "no limit": ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    "no control groups": ("", {}, None),
    "the mount of a container": ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    "a unit of systemd": ("0::/system.slice/a.service\n", {"system.slice/a.service/cpu.max": "50000 100000\n"}, 0.5),
    "a group around it": (
        "0::/kube/pod/one\n",
        {"kube/pod/one/cpu.max": "max 100000\n", "kube/pod/cpu.max": "300000 100000\n", "kube/cpu.max": "9 1\n"},
        3.0,
    ),
    "a damaged file": ("0::/\n", {"cpu.max": "many\n"}, None),
    "version 1": (
        "4:memory:/x\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        {"cpu/docker/abc/cpu.cfs_quota_us": "200000\n", "cpu/docker/abc/cpu.cfs_period_us": "100000\n"},
        2.0,
    ),
    "version 1, a path of the host": (
        "3:cpu:/docker/abc\n",
        {"cpu/cpu.cfs_quota_us": "120000\n", "cpu/cpu.cfs_period_us": "50000\n"},
        2.4,
    ),
    "version 1, no limit": ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_quotas_of_control_groups(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, files, expected = CASES[case]
    (tmp_path / "self").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(cpus, "CGROUP_FILE", tmp_path / "self")
    monkeypatch.setattr(cpus, "CGROUP_MOUNT", tmp_path / "mount")
    assert cpus.read_cpu_quota() == expected


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (0.1, 1), (1.0, 1), (2.4, 3), (64.0, 4)])
def test_cores_are_limited_by_the_quota(quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(cpus, "read_cpu_quota", lambda: quota)
    assert cpus.core_count() == cores


def test_no_control_group_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "CGROUP_FILE", tmp_path / "missing")  # such as on macOS
    assert cpus.read_cpu_quota() is None
