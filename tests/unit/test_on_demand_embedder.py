"""The embedding model that is downloaded at its first use, with a scripted download."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from emberline.api.call import CommonFields, EmbeddingCall
from emberline.core.errors import DownloadError, EngineLoading, InvalidRequest, ModelFileError, ModelNotFound
from emberline.worker import on_demand_embedder
from emberline.worker.on_demand_embedder import OnDemandEmbeddingModel

CALL = EmbeddingCall(CommonFields("minilm"), ["a"])
WAIT_S = 20.0


class FakeModel:
    is_stopped = False

    async def embed(self, call: EmbeddingCall) -> tuple[Sequence[Sequence[float]], int]:
        return [[1.0] for _ in call.inputs], len(call.inputs)

    def stop(self) -> None:
        self.is_stopped = True


class ScriptedDownload:
    """Counts its calls. Each waits until it may end, and then raises the next error, if there is one."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.num_calls = list(errors), 0
        self.may_end = threading.Event()
        self.result = FakeModel()

    def __call__(self) -> Any:
        self.num_calls += 1
        assert self.may_end.wait(WAIT_S)
        if self.errors:
            raise self.errors.pop(0)
        return self.result


def make_model(download: ScriptedDownload) -> OnDemandEmbeddingModel:
    return OnDemandEmbeddingModel("minilm", "an embedder", Path("nowhere"), 2, 256, download)


def test_concurrent_first_requests_share_one_download() -> None:
    async def run() -> None:
        download = ScriptedDownload()
        model = make_model(download)
        calls = [asyncio.create_task(model.embed(CALL)) for _ in range(5)]
        await asyncio.sleep(0)
        calls.pop().cancel()  # its client disconnected; the others still get their vectors
        download.may_end.set()
        assert await asyncio.gather(*calls) == [([[1.0]], 1)] * 4
        assert await model.embed(CALL) == ([[1.0]], 1)
        assert download.num_calls == 1
        model.stop()
        assert download.result.is_stopped

    asyncio.run(run())


def test_request_does_not_wait_long_for_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        download = ScriptedDownload()
        model = make_model(download)
        monkeypatch.setattr(on_demand_embedder, "DOWNLOAD_WAIT_S", 0.0)
        for _ in range(2):
            with pytest.raises(EngineLoading, match="'minilm' is being downloaded"):
                await model.embed(CALL)
        monkeypatch.setattr(on_demand_embedder, "DOWNLOAD_WAIT_S", WAIT_S)
        download.may_end.set()
        assert await model.embed(CALL) == ([[1.0]], 1)
        assert download.num_calls == 1

    asyncio.run(run())


@pytest.mark.parametrize("error", [DownloadError("https://user:secret@index is down"), ModelFileError("damaged")])
def test_failed_download_is_tried_again_after_a_delay(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        download = ScriptedDownload(error)
        download.may_end.set()
        model = make_model(download)
        monkeypatch.setattr(on_demand_embedder, "RETRY_DELAY_S", 1000.0)
        for _ in range(2):
            with pytest.raises(DownloadError, match="could not be downloaded") as raised:
                await model.embed(CALL)
            assert "secret" not in str(raised.value)  # the reason is for the operator
        assert download.num_calls == 1
        model._retry_at = 0.0
        assert await model.embed(CALL) == ([[1.0]], 1)
        assert download.num_calls == 2

    asyncio.run(run())


def test_invalid_requests_do_not_start_the_download() -> None:
    async def run() -> None:
        download = ScriptedDownload()
        model = make_model(download)
        with pytest.raises(ModelNotFound):
            await model.embed(EmbeddingCall(CommonFields("other"), ["a"]))
        with pytest.raises(InvalidRequest, match="dimensions"):
            await model.embed(EmbeddingCall(CommonFields("minilm"), ["a"], dimensions=3))
        assert download.num_calls == 0
        model.stop()

    asyncio.run(run())
