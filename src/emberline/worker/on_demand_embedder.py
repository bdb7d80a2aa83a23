"""OnDemandEmbeddingModel: an embedding model that is downloaded when a request first needs it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from emberline.api.call import EmbeddingCall
from emberline.core.background_threads import run_in_daemon_thread
from emberline.core.errors import DownloadError, EmberlineError, EngineLoading
from emberline.worker.embedding_model import EmbeddingModel, check_embedding_call

log = logging.getLogger("emberline.server")

DOWNLOAD_WAIT_S = 30.0  # for which a request waits for the download; then it gets a 503, and the download continues
RETRY_DELAY_S = 15.0  # after a failed download; until then requests get an error at once


class OnDemandEmbeddingModel:
    """Has the methods of EmbeddingModel. All requests that wait for the download share it."""

    def __init__(
        self,
        name: str,
        description: str,
        directory: Path,
        dim: int,
        max_tokens: int,
        load: Callable[[], EmbeddingModel],
    ) -> None:
        """`directory` will have the files. `load` downloads and loads the model. It is called in a thread, and again
        after it has failed."""
        self.name, self.description, self.directory = name, description, directory
        self.dim, self.max_tokens = dim, max_tokens
        self._load = load
        self._loading: asyncio.Task[EmbeddingModel] | None = None
        self._retry_at = 0.0

    async def embed(self, call: EmbeddingCall) -> tuple[Sequence[Sequence[float]], int]:
        """Return the result of EmbeddingModel.embed, after the download.

        Raises the errors of EmbeddingModel.embed, EngineLoading if the download takes longer than a request waits,
        or DownloadError if it failed.
        """
        check_embedding_call(call, self.name, self.dim)
        return await (await self._wait_until_loaded()).embed(call)

    def stop(self) -> None:
        """Stop the model. Do not wait for its download, which ends with the server's process."""
        if self._loading is None:
            return
        if self._loading.done() and not _has_failed(self._loading):
            self._loading.result().stop()
        self._loading.cancel()

    async def _wait_until_loaded(self) -> EmbeddingModel:
        loading = self._loading
        if loading is None or (_has_failed(loading) and time.monotonic() >= self._retry_at):
            loading = self._loading = asyncio.create_task(self._load_in_thread())
            loading.add_done_callback(_has_failed)  # marks its error as seen, also if all requests were cancelled
        done, _ = await asyncio.wait((loading,), timeout=DOWNLOAD_WAIT_S)
        if not done:
            raise EngineLoading(
                f"the embedding model {self.name!r} is being downloaded, because this is its first use",
                hint="send the request again in a few seconds",
            )
        if isinstance(loading.exception(), EmberlineError):
            raise DownloadError(
                f"the embedding model {self.name!r} could not be downloaded",
                hint=f"the server's log has the reason; the next request after {RETRY_DELAY_S:.0f} s tries it again",
            )
        return loading.result()

    async def _load_in_thread(self) -> EmbeddingModel:
        log.info("Downloading the embedding model at its first use: model=%s", self.name)
        try:
            return await asyncio.wrap_future(run_in_daemon_thread("embedder-download", self._load))
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_DELAY_S
            log.warning("Embedding model unavailable: model=%s reason=%s", self.name, error)
            raise


def _has_failed(loading: asyncio.Task[EmbeddingModel]) -> bool:
    return loading.done() and (loading.cancelled() or loading.exception() is not None)


AnyEmbeddingModel = EmbeddingModel | OnDemandEmbeddingModel
