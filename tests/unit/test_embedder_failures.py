"""An embedder process that dies or is stopped, and calls that take turns, are cancelled or take too long."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bytelevel import tokenizer_file

from emberline.api.call import CommonFields, EmbeddingCall
from emberline.core.errors import ContextLengthExceeded, DeadlineExceeded, EngineFailed, EngineUnavailable
from emberline.engine.embedder import EmbedderProcess
from emberline.worker import embedding_model
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


class CountedEmbedder:
    """Computes vectors of the inputs' lengths, and records the batches. The first one waits until `may_end`."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_end = threading.Event()

    def embed(self, inputs: Sequence[Sequence[int]]) -> list[array[float]]:
        self.batches.append([len(ids) for ids in inputs])
        assert self.may_end.wait(20)
        return [array("f", [len(ids), 0, 0, 0]) for ids in inputs]

    def stop(self) -> None:
        pass


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EmbeddingModel, CountedEmbedder]]:
    tokenizer_file(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 4, "max_position_embeddings": 64}')
    monkeypatch.setattr(embedding_model, "MAX_BATCH_TOKENS", 10)
    model, embedder = EmbeddingModel("m", tmp_path, 1), CountedEmbedder()
    model._process = embedder  # type: ignore[assignment]
    yield model, embedder
    embedder.may_end.set()
    model.stop()


def make_call(tenant: str, *texts: str) -> EmbeddingCall:
    return EmbeddingCall(CommonFields("m", tenant=tenant), texts)


async def wait_for_batch(embedder: CountedEmbedder) -> None:
    async with asyncio.timeout(20):
        while not embedder.batches:
            await asyncio.sleep(0.001)


def test_tenants_take_turns_between_batches(counted: tuple[EmbeddingModel, CountedEmbedder]) -> None:
    model, embedder = counted

    async def run() -> None:
        large = asyncio.create_task(model.embed(make_call("a", "abcd", "abcde", "abcdefghijkl", *("abcdef",) * 3)))
        await wait_for_batch(embedder)
        small = asyncio.create_task(model.embed(make_call("b", "abc")))
        async with asyncio.timeout(20):
            while not model._threads.num_waiting:
                await asyncio.sleep(0.001)
        embedder.may_end.set()
        vectors, num_tokens = await large
        assert [vector[0] for vector in vectors] == [4, 5, 12, 6, 6, 6] and num_tokens == 39
        assert (await small)[1] == 3

    asyncio.run(run())
    assert embedder.batches == [[4, 5], [3], [12], [6], [6], [6]]


def test_cancelled_call_computes_no_further_batch(counted: tuple[EmbeddingModel, CountedEmbedder]) -> None:
    model, embedder = counted

    async def run() -> None:
        large = asyncio.create_task(model.embed(make_call("a", *("abcdef",) * 9)))
        await wait_for_batch(embedder)
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        embedder.may_end.set()
        await model.embed(make_call("a", "abc"))

    asyncio.run(run())
    assert embedder.batches == [[6], [3]]


def test_call_has_a_time_limit(counted: tuple[EmbeddingModel, CountedEmbedder]) -> None:
    model, _ = counted
    model._timeout = 0.05
    with pytest.raises(DeadlineExceeded, match=r"not computed within 0.05 s"):
        asyncio.run(model.embed(make_call("a", "abc")))
