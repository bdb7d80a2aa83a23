"""An embedder process that dies in the middle of a reply, or is stopped while calls wait."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bytelevel import tokenizer_file

from emberline.api.call import CommonFields, EmbeddingCall
from emberline.core.errors import ContextLengthExceeded, EngineFailed, EngineUnavailable
from emberline.engine.embedder import EmbedderProcess
from emberline.worker.embedding_model import EmbeddingModel

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


def test_text_that_cannot_fit_is_rejected_before_it_is_tokenized(tmp_path: Path) -> None:
    tokenizer_file(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 4, "max_position_embeddings": 8}')
    model = EmbeddingModel("m", tmp_path, 1)
    model._tokenizer.encode_batch = lambda *_: pytest.fail("it was tokenized")  # type: ignore[method-assign]
    with pytest.raises(ContextLengthExceeded, match=r"input\[1\] has 1025 characters"):
        asyncio.run(model.embed(EmbeddingCall(CommonFields("m"), ["a", " " * 1025])))
    model.stop()
