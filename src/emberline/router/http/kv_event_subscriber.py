"""KVEventSubscriber: receives events about stored and removed KV blocks from all workers, and updates the KV index."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from emberline.cluster.membership import WorkerHealth
from emberline.core.blockbatch import BlockBatch
from emberline.core.errors import EngineUnavailable
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.kvindex import KVIndex, KVIndexState
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker import Worker
from emberline.router.worker_client import UpstreamBroken, UpstreamUnreachable, WorkerClient

log = logging.getLogger("emberline.router")

WORKER_SCAN_INTERVAL_S = 0.25
RECONNECT_PAUSE_S = 0.5
READ_TIMEOUT_S = 5.0  # workers send a batch, empty if need be, more often than this
MAX_LINE_BYTES = 32 << 20

_BATCH = msgspec.json.Decoder(BlockBatch)


class KVEventSubscriber:
    """Reads `/cluster/events` of each Emberline worker over one permanent connection per worker."""

    def __init__(self, dispatcher: Dispatcher, index: KVIndex, client: WorkerClient, cluster_key: str | None) -> None:
        self._dispatcher = dispatcher
        self._index = index
        self._client = client
        self._headers = {"authorization": f"Bearer {cluster_key}"} if cluster_key else {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by worker id

    async def run(self) -> None:
        """Stay subscribed to the KV events of all registered workers until cancelled."""
        try:
            while True:
                self._update_subscriptions()
                await asyncio.sleep(WORKER_SCAN_INTERVAL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _update_subscriptions(self) -> None:
        reachable = {worker.id: worker for worker in self._dispatcher.workers.values() if self._is_reachable(worker)}
        registered = {worker.id for worker in self._dispatcher.workers.values()}
        for worker_id in self._tasks.keys() - reachable.keys():
            self._tasks.pop(worker_id).cancel()
            (self._index.mark_disconnected if worker_id in registered else self._index.remove_worker)(worker_id)
        for worker_id in reachable.keys() - self._tasks.keys():
            self._tasks[worker_id] = asyncio.create_task(self._subscribe(reachable[worker_id]))

    def _is_reachable(self, worker: Worker) -> bool:
        member = self._dispatcher.membership.get(worker.name)
        if worker.dialect != "native" or member is None or member.is_leaving:
            return False
        return self._dispatcher.health(worker) is not WorkerHealth.LOST

    async def _subscribe(self, worker: Worker) -> None:
        while True:
            try:
                await self._read_events(worker)
            except (UpstreamUnreachable, UpstreamBroken, EngineUnavailable, TimeoutError, *JSON_DECODE_ERRORS) as e:
                log.debug("KV event stream ended: worker=%s reason=%s", worker.name, e)
            except Exception:
                log.exception("KV event stream failed: worker=%s", worker.name)
            self._index.mark_disconnected(worker.id)
            if not self._index.has_capacity_for(worker.id):
                log.warning(
                    "KV index is full, so this worker's cache content is estimated from its requests: worker=%s",
                    worker.name,
                )
                return  # until the worker registers again
            await asyncio.sleep(RECONNECT_PAUSE_S)

    async def _read_events(self, worker: Worker) -> None:
        """Apply a worker's batches of KV events to the index until the connection ends or a batch is missing."""
        incarnation, seq = self._index.last_applied_batch(worker.id)
        request = UpstreamRequest("GET", f"/cluster/events?incarnation={incarnation}&since={seq}", self._headers, b"")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(READ_TIMEOUT_S) as timer:
            with contextlib.closing(await self._client.request(self._dispatcher.worker_url(worker), request)) as reply:
                if reply.status != 200:
                    raise UpstreamBroken(f"the worker answered /cluster/events with HTTP status {reply.status}")
                rest = b""
                while data := await reply.read():
                    timer.reschedule(loop.time() + READ_TIMEOUT_S)
                    *lines, rest = (rest + data).split(b"\n")
                    if len(rest) > MAX_LINE_BYTES:
                        raise UpstreamBroken(
                            f"a line of the worker's /cluster/events exceeds the limit of {MAX_LINE_BYTES} bytes"
                        )
                    if not all(self._apply_batch(worker, _BATCH.decode(line)) for line in lines):
                        return

    def _apply_batch(self, worker: Worker, batch: BlockBatch) -> bool:
        """Apply a batch of KV events, and return whether to keep reading from this connection.

        Return False if an earlier batch is missing. The caller then reads a snapshot of all blocks of the worker."""
        state = self._index.apply_batch(worker.id, batch)
        return state is KVIndexState.EXACT or batch.part + 1 < batch.parts or not batch.seq + batch.parts
