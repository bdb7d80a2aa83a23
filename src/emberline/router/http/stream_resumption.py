"""StreamResumer: finds the stream that a client continues with the header Last-Event-ID.

The router that carried the stream may be dead. The event id names the worker that wrote the event, and that worker
keeps the stream's tokens for a while (`cluster/resumable_streams.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import msgspec

from emberline.cluster.membership import ClusterMember
from emberline.cluster.resumable_streams import (
    RECLAIM_PATH,
    EventPosition,
    ReclaimRequest,
    StreamContinuation,
    digest_request,
)
from emberline.core.config import RouterConfig
from emberline.core.errors import EngineUnavailable, StreamNotResumable
from emberline.core.handoff import Handoff
from emberline.core.tenants import TENANT_SALT_HEADER
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.router.dialect import TENANT_HEADER
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.worker_registry import TICK_INTERVAL_S
from emberline.router.request_summary import RequestSummary
from emberline.router.stream_tracker import StreamTracker
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker import Worker
from emberline.router.worker_client import UpstreamBroken, UpstreamUnreachable, WorkerClient
from emberline.server.access import derive_tenant_id
from emberline.server.exchange import Exchange

log = logging.getLogger("emberline.router")

LAST_EVENT_ID_HEADER = "last-event-id"
RECLAIM_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class StreamResumption:
    """A stream that began over another connection, and the part of its output that the client has received."""

    worker: Worker  # which wrote the last event that the client received
    handoff: Handoff
    seed: int | None
    reply_id: str
    created: int
    is_complete: bool  # the client has received everything

    def make_tracker(self) -> StreamTracker:
        return StreamTracker(self.handoff, self.reply_id, self.created)


class StreamResumer:
    def __init__(self, dispatcher: Dispatcher, client: WorkerClient, config: RouterConfig) -> None:
        self._dispatcher = dispatcher
        self._client = client
        self._config = config

    async def find_stream(
        self, exchange: Exchange, summary: RequestSummary, last_event_id: str, body: bytes
    ) -> StreamResumption:
        """Return the stream whose event `last_event_id` the client received last.

        Raises InvalidRequest if the id is malformed, StreamNotResumable if no worker has the stream any more, and
        EngineUnavailable if its worker does not answer."""
        position = EventPosition.parse(last_event_id)
        member = await self._find_worker(position.incarnation)
        request = ReclaimRequest(position.stream, position.group, position.event, digest_request(exchange.path, body))
        worker = self._dispatcher.workers[member.registration.name]
        found = await self._reclaim(exchange, worker, request)
        # The worker has the prompt in its cache: it is preferred.
        self._dispatcher.prefixes.record_prompt(summary.prefixes, worker.id)
        handoff = Handoff.parse(found.handoff)
        return StreamResumption(worker, handoff, found.seed, found.id, found.created, found.is_complete)

    async def _find_worker(self, incarnation: str) -> ClusterMember:
        """Return the worker with this incarnation. A router that has just started waits until workers register."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * self._config.beat_seconds):
                while True:
                    for member in self._dispatcher.membership:
                        # vLLM and SGLang servers must not get the cluster key.
                        known = member.registration
                        if known.incarnation == incarnation and known.dialect == "native":
                            return member
                    await asyncio.sleep(TICK_INTERVAL_S)
        raise _not_resumable("the worker that generated the stream is gone")

    async def _reclaim(self, exchange: Exchange, worker: Worker, request: ReclaimRequest) -> StreamContinuation:
        headers = {"content-type": "application/json"}
        if self._config.cluster_key:
            headers["authorization"] = f"Bearer {self._config.cluster_key}"
        if tenant := derive_tenant_id(exchange):
            headers[TENANT_HEADER] = f"{'checked' if self._config.api_keys else 'presented'} {tenant}"
        if salt := exchange.header(TENANT_SALT_HEADER):
            headers[TENANT_SALT_HEADER] = salt
        upstream = UpstreamRequest("POST", RECLAIM_PATH, headers, msgspec.json.encode(request))
        try:
            async with asyncio.timeout(RECLAIM_TIMEOUT_S):
                reply = await self._client.request(self._dispatcher.worker_url(worker), upstream)
                with contextlib.closing(reply):
                    data = await reply.read_all()
            if reply.status == 200:
                return msgspec.json.decode(data, type=StreamContinuation)
        except (TimeoutError, UpstreamUnreachable, UpstreamBroken, *JSON_DECODE_ERRORS) as e:
            message = f"worker {worker.name}, which has the stream, does not answer: {type(e).__name__}"
            raise EngineUnavailable(message, hint="send the request again with the same Last-Event-ID") from e
        if reply.status in (401, 403):
            log.error("Worker refuses the router's cluster key: worker=%s status=%d", worker.name, reply.status)
            raise EngineUnavailable(
                f"worker {worker.name}, which has the stream, refuses the router's cluster key",
                hint="the first key in the router's EMBERLINE_CLUSTER_KEY must be one of the worker's keys",
            )
        raise _not_resumable(f"worker {worker.name} does not have the stream any more")


def _not_resumable(message: str) -> StreamNotResumable:
    return StreamNotResumable(message, hint="send the request again, without Last-Event-ID")
