"""KVEventSubscriber: keeps the KV index up to date with the block events of all workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from emberline.cluster.membership import Health
from emberline.core.blockbatch import BlockBatch
from emberline.core.errors import EngineUnavailable
from emberline.net.notjson import NOT_JSON
from emberline.router.call import Call
from emberline.router.kvindex import KVIndex, State
from emberline.router.upstream import Broken, Unreached, Upstream
from emberline.router.worker import Worker
from emberline.server.routing.dispatch import Dispatch

log = logging.getLogger("emberline.router")

LOOK = 0.25
PAUSE = 0.5
PATIENCE = 5.0  # workers send a batch, empty if need be, more often than this
LONGEST = 32 << 20

_BATCH = msgspec.json.Decoder(BlockBatch)


class Following:
    """Holds one connection to `/cluster/events` of each native worker."""

    def __init__(self, dispatch: Dispatch, index: KVIndex, upstream: Upstream, key: str | None) -> None:
        self._dispatch = dispatch
        self._index = index
        self._upstream = upstream
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by worker id

    async def run(self) -> None:
        """Subscribe to all workers until cancelled."""
        try:
            while True:
                self._look()
                await asyncio.sleep(LOOK)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _look(self) -> None:
        reachable = {worker.id: worker for worker in self._dispatch.workers.values() if self._is_there(worker)}
        registered = {worker.id for worker in self._dispatch.workers.values()}
        for worker_id in self._tasks.keys() - reachable.keys():
            self._tasks.pop(worker_id).cancel()
            (self._index.cut if worker_id in registered else self._index.forget)(worker_id)
        for worker_id in reachable.keys() - self._tasks.keys():
            self._tasks[worker_id] = asyncio.create_task(self._follow(reachable[worker_id]))

    def _is_there(self, worker: Worker) -> bool:
        member = self._dispatch.membership.get(worker.name)
        if worker.dialect != "native" or member is None or member.left:
            return False
        return self._dispatch.health(worker) is not Health.LOST

    async def _follow(self, worker: Worker) -> None:
        while True:
            try:
                await self._listen(worker)
            except (Unreached, Broken, EngineUnavailable, TimeoutError, *NOT_JSON) as e:
                log.debug("KV event stream ended: worker=%s reason=%s", worker.name, e)
            except Exception:
                log.exception("KV event stream failed: worker=%s", worker.name)
            self._index.cut(worker.id)
            if not self._index.follows(worker.id):
                log.warning(
                    "KV index is full, a worker's cache is inferred from its requests instead: worker=%s", worker.name
                )
                return  # until the worker registers again
            await asyncio.sleep(PAUSE)

    async def _listen(self, worker: Worker) -> None:
        """Apply batches until the connection ends or a batch is missing."""
        incarnation, seq = self._index.position(worker.id)
        call = Call("GET", f"/cluster/events?incarnation={incarnation}&since={seq}", self._headers, b"")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE) as timer:
            with contextlib.closing(await self._upstream.request(self._dispatch.url(worker), call)) as reply:
                if reply.status != 200:
                    raise Broken(f"/cluster/events answered {reply.status}")
                rest = b""
                while data := await reply.read():
                    timer.reschedule(loop.time() + PATIENCE)
                    *lines, rest = (rest + data).split(b"\n")
                    if len(rest) > LONGEST:
                        raise Broken(f"a line of /cluster/events exceeds {LONGEST} bytes")
                    if not all(self._takes(worker, _BATCH.decode(line)) for line in lines):
                        return

    def _takes(self, worker: Worker, batch: BlockBatch) -> bool:
        """Apply a batch and return whether to continue.

        After the last part of a snapshot, or any other batch, the index must be exact."""
        state = self._index.apply(worker.id, batch)
        return state is State.EXACT or batch.part + 1 < batch.parts or not batch.seq + batch.parts
