"""What only Linux has, taken away: the paths that macOS goes. They are not tested on macOS itself."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import handle_signals

from emberline.bench import processes
from emberline.cli import doctor, serve
from emberline.cli.__main__ import main
from emberline.core import cpus
from emberline.kernels.cpu import build as kernels
from emberline.kv.transfer import shm, unix


@pytest.fixture
def no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (serve, doctor):
        monkeypatch.setattr(module, "PROC", tmp_path / "proc")


def test_process_start_without_proc_is_now(no_proc: None) -> None:
    assert abs(serve._process_start_time() - time.time()) < 60


def test_doctor_works_without_proc(no_proc: None) -> None:
    found = {finding.subject: finding.detail for finding in doctor._check_machine()}
    assert found["cpu"].endswith(": ") and "GiB free" in found["memory"]


def test_cores_are_counted_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(cpus, "read_cpu_quota", lambda: None)
    assert cpus.core_count() == (os.cpu_count() or 1)


def test_refused_rlimit_does_not_end_grammar_guard(tmp_path: Path) -> None:
    """The child of engine/grammar_guard.py, where setrlimit fails as it does on macOS."""
    code = (
        "import io, resource, sys\n"
        "def refuse(*_): raise ValueError('current limit exceeds maximum limit')\n"
        "resource.setrlimit = refuse\n"
        "import emberline.engine.grammar as grammar\n"
        "grammar.GrammarCompiler = lambda *_: None\n"
        "from emberline.engine import grammar_guard\n"
        "sys.stdin = io.StringIO('')\n"
        "grammar_guard.serve_checks('t', 1, [])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert resource.getrlimit(resource.RLIMIT_CORE)


COMPILER = """#!/bin/bash
echo "$*" >>"$(dirname "$0")/called"
case $* in
  *=native*) echo "error: unsupported argument 'native'" >&2; exit 1 ;;
  *--version*) echo "Apple clang" ;;
  *) while [ "$1" != -o ]; do shift; done; echo made >"$2" ;;
esac
"""


def test_compiler_without_march_native_builds_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "clang++").write_text(COMPILER)
    (tools / "clang++").chmod(0o755)
    for name in ("bash", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(kernels.platform, "machine", lambda: "arm64")
    made = kernels.build_library(tmp_path / "cache")
    assert made.read_text() == "made\n"
    called = (tools / "called").read_text()
    assert "-mcpu=native" in called and called.count(" -shared ") == 1
    assert kernels.build_library(tmp_path / "cache") == made
    assert (tools / "called").read_text().count(" -o ") == called.count(" -o "), "it is not tried again at each start"


def test_shared_memory_without_memfd_and_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fd, read_only = shm._create_memory_file(8192)
    assert read_only is not None
    segment = object.__new__(shm.SharedSegment)
    segment.fd, segment._read_only = fd, read_only
    reader = segment.open_read_only()
    os.pwrite(fd, b"kv", 4096)
    assert os.pread(reader, 2, 4096) == b"kv" and os.fstat(reader).st_size == 8192
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(reader, b"x")
    assert os.fstat(fd).st_nlink == 0, "it goes with the last process that has it"
    for each in (fd, read_only, reader):
        os.close(each)


def test_processes_connect_without_abstract_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix, "HAS_ABSTRACT_NAMES", False)
    listener, address = unix.create_unix_listener()
    assert Path(address).stat().st_mode & 0o077 == 0 and len(address.encode()) < 104, "macOS's longest"
    with unix.make_unix_connector(address)(5.0) as caller:
        taken, _ = listener.accept()
        caller.sendall(b"hello")
        assert taken.recv(5) == b"hello"
        unix.check_same_user(SimpleNamespace(socket=taken))  # type: ignore[arg-type]
        taken.close()
    listener.close()
    Path(address).unlink()


@pytest.mark.parametrize("other", [0, 1])
def test_peer_is_identified_without_peercred(monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    monkeypatch.delattr(socket, "SO_PEERCRED")
    asked: list[Any] = []

    def getsockopt(*words: int) -> bytes:
        asked.append(words)
        return struct.pack("2Ih16I", 0, os.getuid() + other, 1, *([0] * 16))

    channel: Any = SimpleNamespace(socket=SimpleNamespace(getsockopt=getsockopt))
    if other:
        with pytest.raises(unix.BadTransfer, match="same user"):
            unix.check_same_user(channel)
    else:
        unix.check_same_user(channel)
    assert asked == [(0, 1, 128)]


def test_tests_run_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handle_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_bench_counts_busy_cores_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path / "proc")
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert processes.measure_busy_cores(0.0) == 1.5


def test_chaos_needs_linux(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["chaos"]) == 1
    assert "emberline chaos runs only on Linux" in capsys.readouterr().err
