"""WorkerSleep: puts workers to sleep and wakes them, for an autoscaler. A request wakes a sleeping worker too."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from emberline.core.errors import EngineUnavailable, InvalidRequest, NotFound
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.worker_registry import TICK_INTERVAL_S
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker_client import UpstreamBroken, UpstreamUnreachable, WorkerClient

SLEEP_PATH = "/cluster/sleep"
SLEEP_TIMEOUT_S = 5.0
MAX_SLEEP_WAIT_S = 3.0


class WorkerSleep:
    def __init__(self, dispatcher: Dispatcher, client: WorkerClient, cluster_key: str | None) -> None:
        self._dispatcher = dispatcher
        self._client = client
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {cluster_key}"} if cluster_key else {}
        )

    async def set_asleep(self, name: str, on: bool) -> None:
        """Tell a worker to sleep (`on`), which it does only without open requests, or to wake.

        With `on`, wait until a heartbeat shows that the worker sleeps, but at most MAX_SLEEP_WAIT_S: a new request may
        keep the worker awake, or it may still be copying its weights. Raises NotFound for an unknown name,
        InvalidRequest if the worker cannot sleep, and EngineUnavailable if it does not answer."""
        worker = self._dispatcher.workers.get(name)
        if worker is None:
            raise NotFound(f"no worker is named {name[:200]!r}", hint="GET /cluster/status lists the workers")
        if worker.dialect != "native":  # other servers must not get the cluster key
            message = f"worker {name} is a {worker.dialect} server, which this router cannot put to sleep"
            raise InvalidRequest(message, param="name", hint="only workers of emberline worker can sleep")
        order = UpstreamRequest("POST", SLEEP_PATH, self._headers, msgspec.json.encode({"on": on}))
        try:
            async with asyncio.timeout(SLEEP_TIMEOUT_S):
                reply = await self._client.request(self._dispatcher.worker_url(worker), order)
                with contextlib.closing(reply):
                    await reply.read_all()
        except (TimeoutError, UpstreamUnreachable, UpstreamBroken) as e:
            message = f"worker {name} does not answer: {type(e).__name__}"
            raise EngineUnavailable(message, hint="see the worker's log") from e
        if reply.status in (400, 404):  # 404: an earlier release
            raise InvalidRequest(f"worker {name} cannot sleep", param="name", hint="start it with --can-sleep")
        if reply.status != 200:
            message = f"worker {name} answered status {reply.status} to a request to sleep or wake"
            raise EngineUnavailable(message, hint="see the worker's log")
        if on:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAX_SLEEP_WAIT_S):
                    while worker.id not in self._dispatcher.sleeping_worker_ids:
                        await asyncio.sleep(TICK_INTERVAL_S)
