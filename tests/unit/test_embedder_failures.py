"""An embedder process that dies in the middle of a reply, or is stopped while calls wait."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emberline.core.errors import EngineFailed, EngineUnavailable
from emberline.engine.embedder import EmbedderProcess

READ_REQUEST = "import sys, time; sys.stdin.buffer.read(4); "
HALF = READ_REQUEST + "sys.stdout.buffer.write((100).to_bytes(4, 'little') + b'half')"
NOTHING = READ_REQUEST + "time.sleep(60)"


def embedder(script: str) -> EmbedderProcess:
    made = EmbedderProcess(Path("nowhere"), 1)
    made._command = [sys.executable, "-c", script]
    return made


def test_truncated_reply_is_an_error() -> None:
    them = embedder(HALF)
    for _ in range(2):  # another process is started
        with pytest.raises(EngineFailed, match="died"):
            them.embed([[1]])


def test_stop_fails_waiting_calls() -> None:
    them = embedder(NOTHING)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(them.embed, [[1]])
        until = time.monotonic() + 20
        while them._process is None and time.monotonic() < until:
            time.sleep(0.01)
        second = threads.submit(them.embed, [[1]])
        them.stop()
        ends = [type(each.exception(20)) for each in (first, second)]
    assert ends == [EngineFailed, EngineUnavailable]
    assert them._process is not None and them._process.poll() is not None
