"""RouterApp: the router's HTTP endpoints: the models' API, the calls of workers, status and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TypeVar

import msgspec

from emberline.api.openai import models
from emberline.cluster.card import Beat, Card, Welcome
from emberline.cluster.membership import Health
from emberline.core.clock import Clock
from emberline.core.config import RouterConfig
from emberline.core.errors import InvalidRequest
from emberline.core.offload import LARGE, offload
from emberline.net.notjson import NOT_JSON
from emberline.router.ask import Ask
from emberline.router.upstream import Upstream
from emberline.server.exchange import Exchange, Receive, Scope, Send
from emberline.server.keys import Access, tenant_of
from emberline.server.metrics import exposition
from emberline.server.pages import Page
from emberline.server.routing.dispatch import TICK, Dispatch
from emberline.server.routing.relay import Relay
from emberline.server.routing.router_metrics import Seen, status
from emberline.server.site import Route, Site
from emberline.server.tracing import OPERATIONS, Tracing

log = logging.getLogger("emberline.router")

PROXIED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
           "/v1/embeddings", "/tokenize", "/detokenize")  # fmt: skip
SESSION = "x-session-affinity"
PAIRING_S = 1.0  # for workers to connect to a draining one, after two heartbeat intervals

Struct = TypeVar("Struct", bound=msgspec.Struct)


class Leaving(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    incarnation: str


class Draining(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    on: bool = True
    move: bool = False  # move its streams to other workers


class RouterApp:
    def __init__(
        self,
        config: RouterConfig,
        upstream: Upstream,
        clock: Clock,
        pages: dict[str, Page],
        tracing: Tracing | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self.dispatch = Dispatch(config, clock)
        self._relay = Relay(self.dispatch, upstream, config)
        self._tracing = tracing
        self._began = int(time.time())
        routes = {
            **{path: Route(self._proxy) for path in PROXIED},
            **({path: Route(tracing.traced(self._proxy)) for path in OPERATIONS} if tracing is not None else {}),
            "/v1/models": Route(self._models, "GET"),
            "/cluster/register": Route(self._register, needs="cluster"),
            "/cluster/beat": Route(self._beat, needs="cluster"),
            "/cluster/leave": Route(self._leave, needs="cluster"),
            "/cluster/drain": Route(self._drain, needs="cluster"),
            "/cluster/status": Route(self._status, "GET", "operator"),
            "/health": Route(self._ready, "GET", "nothing"),
            "/health/live": Route(self._live, "GET", "nothing"),
            "/health/ready": Route(self._ready, "GET", "nothing"),
            "/metrics": Route(self._scrape, "GET", "operator"),
        }
        hint = "GET /v1/models lists the models"
        access = Access(config.api_keys, config.cluster_key)
        self._site = Site(routes, Route(self._model, "GET"), pages, access, hint)
        self._site.below["/v1/responses/"] = Route(self._stored, method="")

    async def tick(self) -> None:
        """Update the workers' state every `TICK_INTERVAL_S` until cancelled."""
        while True:
            await asyncio.sleep(TICK)
            try:
                self.dispatch.tick()
            except Exception:
                log.exception("update of the workers' state failed")  # the next tick tries again

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        x = Exchange(scope, receive, send)
        try:
            await self._site.answer(x)
        finally:
            log.debug("request: method=%s path=%s status=%s %s", x.method, x.path, x.outcome or x.status, x.note)

    # -- clients -------------------------------------------------------------------------------------------------------

    async def _proxy(self, x: Exchange) -> None:
        body = await x.body(self._config.max_body)
        about = x.header(SESSION), tenant_of(x) if self._config.api_keys else ""
        ask = Ask.read(body, *about) if len(body) < LARGE else await offload.run(len(body), Ask.read, body, *about)
        await x.while_connected(self._relay.run(x, ask, body))

    async def _stored(self, x: Exchange) -> None:
        """Relay a call for a stored response to any worker: workers of one machine share the file."""
        await x.body(0)
        await x.while_connected(self._relay.run(x, Ask("", 0, False, None), b""))

    async def _models(self, x: Exchange) -> None:
        await x.json(models.list_models(self._served()))

    async def _model(self, x: Exchange) -> None:
        await x.json(models.retrieve_model(self._served(), x.path.removeprefix("/v1/models/")))

    def _served(self) -> list[models.ServedModel]:
        """Return the models of all workers that are not lost.

        A model's context length is the smallest of its workers'."""
        contexts: dict[str, int] = {}
        generating: set[str] = set()
        sampling: dict[str, dict[str, float]] = {}
        for _, member, health in self._seen():
            if health is not Health.LOST:
                for model in member.card.models:
                    contexts[model.name] = min(contexts.get(model.name, model.max_context), model.max_context)
                    sampling.setdefault(model.name, model.sampling)
                    if model.max_running:  # 0 for an embedder
                        generating.add(model.name)
        return [
            models.ServedModel(
                name,
                self._began,
                context,
                kind="chat" if name in generating else "embedding",
                sampling=sampling[name],
            )
            for name, context in sorted(contexts.items())
        ]

    # -- workers -------------------------------------------------------------------------------------------------------

    async def _register(self, x: Exchange) -> None:
        card = await self._read(x, Card)
        self.dispatch.register(card)
        await x.json(self._welcome(card.name))

    async def _beat(self, x: Exchange) -> None:
        beat = await self._read(x, Beat)
        self.dispatch.beat(beat)
        await x.json(self._welcome(beat.name))

    def _welcome(self, name: str) -> Welcome:
        return Welcome(self._config.beat_seconds, self.dispatch.peers(name))

    async def _leave(self, x: Exchange) -> None:
        request = await self._read(x, Leaving)
        self.dispatch.leave(request.name, request.incarnation)
        await x.json({})

    async def _drain(self, x: Exchange) -> None:
        request = await self._read(x, Draining)
        self.dispatch.drain(request.name, request.on)
        if request.on and request.move:
            await self._paired_with(request.name)
            self.dispatch.drain(request.name, on=True, move=True)
        await x.json({})

    async def _paired_with(self, name: str) -> None:
        """Wait, for a limited time, until other workers can fetch this worker's blocks."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.beat_seconds * 2 + PAIRING_S):
                while not self.dispatch.is_ready_to_move(name):
                    await asyncio.sleep(TICK)

    async def _read(self, x: Exchange, kind: type[Struct]) -> Struct:
        try:
            return msgspec.json.decode(await x.body(1 << 20), type=kind)
        except NOT_JSON as e:
            raise InvalidRequest(f"the body of {x.path} is not valid: {e}") from e

    # -- status --------------------------------------------------------------------------------------------------------

    def _seen(self) -> list[Seen]:
        views = []
        for worker in sorted(self.dispatch.workers.values(), key=lambda worker: worker.name):
            member = self.dispatch.membership.get(worker.name)
            assert member is not None
            views.append((worker, member, self.dispatch.health(worker)))
        return views

    async def _status(self, x: Exchange) -> None:
        body = status(self._seen(), self.dispatch.metrics, self._clock.now(), self.dispatch.kv)
        await x.json({**body, "open_requests": self.dispatch.num_open, "uptime_seconds": time.time() - self._began})

    async def _live(self, x: Exchange) -> None:
        await x.json({"status": "live"})

    async def _ready(self, x: Exchange) -> None:
        workers = {worker.name: health.value for worker, _, health in self._seen()}
        ready = "ready" in workers.values()
        body = {"status": "ready" if ready else "waiting for workers", "workers": workers}
        await x.json(body, 200 if ready else 503)

    async def _scrape(self, x: Exchange) -> None:
        families = self.dispatch.metrics.families(self._seen(), len(self.dispatch.prefixes), self.dispatch.kv)
        trace_families = self._tracing.families() if self._tracing is not None else ()
        text = exposition([*families, self._site.replies.family(), *trace_families])
        await x.reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
