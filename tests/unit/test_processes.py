"""bench/processes.py: what other processes take from this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from emberline.bench import processes


def write_stat(proc: Path, pid: int, parent: int, *ticks: int) -> None:
    """`ticks`: of user and system time of the process, and of its children that ended."""
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a (name)) S {parent} " + "0 " * 9 + " ".join(map(str, ticks)) + " 0")


def test_foreign_time_is_that_of_processes_that_are_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, second = os.getpid(), os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "stat").write_text(f"cpu 1 2 3 4 5 6 7 {3 * second} 9 10\n")
    assert processes.total_foreign_seconds() == 3  # stolen by the host
    write_stat(tmp_path, own, 1, 1000, 1000, 1000, 1000)
    write_stat(tmp_path, own + 7, own, 1000, 1000, 0, 0)
    write_stat(tmp_path, own + 2, own + 7, 1000, 1000, 0, 0)  # a grandchild with a lower pid than its parent
    assert processes.total_foreign_seconds() == 3
    write_stat(tmp_path, own + 1, 1, 2 * second, second, 4 * second, 0)
    write_stat(tmp_path, own + 3, own + 1, second, 0, 0, second)
    assert processes.total_foreign_seconds() == 3 + 7 + 2
