"""Following: the router listens to what its workers' caches hold, each on a connection of its own."""

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

LOOK = 0.25  # seconds between looks at who is there
PAUSE = 0.5  # seconds until one that broke off is asked again
PATIENCE = 5.0  # seconds without a sign of life
LONGEST = 32 << 20  # bytes of a line

_BATCH = msgspec.json.Decoder(BlockBatch)


class Following:
    def __init__(self, dispatch: Dispatch, index: KVIndex, upstream: Upstream, key: str | None) -> None:
        self._dispatch = dispatch
        self._index = index
        self._upstream = upstream
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by worker id

    async def run(self) -> None:
        """For as long as the router runs."""
        try:
            while True:
                self._look()
                await asyncio.sleep(LOOK)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _look(self) -> None:
        there = {worker.id: worker for worker in self._dispatch.workers.values() if self._is_there(worker)}
        known = {worker.id for worker in self._dispatch.workers.values()}
        for id_ in self._tasks.keys() - there.keys():
            self._tasks.pop(id_).cancel()
            (self._index.cut if id_ in known else self._index.forget)(id_)
        for id_ in there.keys() - self._tasks.keys():
            self._tasks[id_] = asyncio.create_task(self._follow(there[id_]))

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
                log.debug("following %s: %s", worker.name, e)
            except Exception:
                log.exception("following %s", worker.name)
            self._index.cut(worker.id)
            if not self._index.follows(worker.id):
                log.warning(
                    "%s holds more blocks than there is room to know of: what it holds is inferred", worker.name
                )
                return  # until it comes anew
            await asyncio.sleep(PAUSE)

    async def _listen(self, worker: Worker) -> None:
        """Until it breaks off, or something is missing."""
        incarnation, seq = self._index.position(worker.id)
        call = Call("GET", f"/cluster/events?incarnation={incarnation}&since={seq}", self._headers, b"")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE) as timer:
            with contextlib.closing(await self._upstream.request(self._dispatch.url(worker), call)) as reply:
                if reply.status != 200:
                    raise Broken(f"status {reply.status}")
                rest = b""
                while data := await reply.read():
                    timer.reschedule(loop.time() + PATIENCE)
                    *lines, rest = (rest + data).split(b"\n")
                    if len(rest) > LONGEST:
                        raise Broken(f"a line of more than {LONGEST} bytes")
                    if not all(self._takes(worker, _BATCH.decode(line)) for line in lines):
                        return

    def _takes(self, worker: Worker, batch: BlockBatch) -> bool:
        """Whether it is worth to go on: with the last part of a snapshot, or any other batch, all should be known."""
        state = self._index.apply(worker.id, batch)
        return state is State.EXACT or batch.part + 1 < batch.parts or not batch.seq + batch.parts
