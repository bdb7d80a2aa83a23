"""The engine's HTTP face: routes, keys, errors and replies. Each request is answered exactly once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from emberline import __version__
from emberline.api import tokenize
from emberline.api.anthropic import request as anthropic
from emberline.api.openai import embeddings, models
from emberline.api.openapi import document
from emberline.core.config import ServerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Stats
from emberline.core.offload import LARGE, offload
from emberline.engine.stream import AsyncEngine, State
from emberline.server.exchange import Exchange, Receive, Scope, Send
from emberline.server.keys import Access
from emberline.server.metrics import CacheInfo, Family, exposition
from emberline.server.pages import Page
from emberline.server.site import Handler, Route, Site
from emberline.server.tracing import Tracing
from emberline.server.worker.block_events import BlockEvents
from emberline.server.worker.calls import Calls
from emberline.server.worker.catalog import Catalog, Served
from emberline.server.worker.cluster_calls import ClusterCalls
from emberline.server.worker.embeddings import Embeddings
from emberline.server.worker.journey import Journey
from emberline.server.worker.prompts import LONG_TEXT
from emberline.server.worker.protocol import PROTOCOLS, parse_light
from emberline.server.worker.response_store import ResponseStore
from emberline.server.worker.stored_responses import BELOW as RESPONSES
from emberline.server.worker.stored_responses import StoredResponses
from emberline.server.worker.transfer_metrics import families as transfer_families
from emberline.tokens.tokenizer import Tokenizer

log = logging.getLogger("emberline.server")

T = TypeVar("T")

STUCK = 30.0  # seconds without a sign of life from the engine: /health/progress fails


class EngineApp:
    def __init__(
        self,
        config: ServerConfig,
        engine: AsyncEngine,
        catalog: Catalog,
        embeddings: Embeddings | None,
        pages: dict[str, Page],
        tracing: Tracing | None = None,
        store: ResponseStore | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._catalog = catalog
        responses = StoredResponses(store, self._tenant)
        self._calls = Calls(catalog, responses)
        self._embeddings = embeddings
        self._engine.on_stats = lambda name, stats: catalog[name].metrics.stepped(stats)
        self._began = time.time()
        self._document = document(__version__)
        self._tracing = tracing
        traced: Callable[[Handler], Handler] = (lambda handler: handler) if tracing is None else tracing.traced
        routes = {
            **{path: Route(traced(self._generate)) for path in PROTOCOLS},
            "/v1/messages/count_tokens": Route(self._count_tokens),
            "/v1/embeddings": Route(traced(self._embed)),
            "/v1/models": Route(self._models, "GET"),
            "/tokenize": Route(self._tokenize),
            "/detokenize": Route(self._detokenize),
            "/stats": Route(self._stats, "GET", "operator"),
            "/health": Route(self._ready, "GET", "nothing"),
            "/health/live": Route(self._live, "GET", "nothing"),
            "/health/ready": Route(self._ready, "GET", "nothing"),
            "/health/progress": Route(self._progress, "GET", "nothing"),
            "/metrics": Route(self._scrape, "GET", "operator"),
            "/openapi.json": Route(self._openapi, "GET", "nothing"),
        }
        if config.worker is not None:
            cluster = ClusterCalls(self._calls, config.max_body, keyed=bool(config.api_keys))
            routes["/cluster/resume"] = Route(traced(cluster.resume), needs="cluster")
            routes["/cluster/prefill"] = Route(traced(cluster.prefill), needs="cluster")
            routes["/cluster/events"] = Route(BlockEvents(engine).follow, "GET", "cluster")
        cluster_key = config.worker.cluster_key if config.worker is not None else None
        hint = "/openapi.json lists what is here"
        access = Access(config.api_keys, cluster_key, config.closed)
        self._site = Site(routes, Route(self._model, "GET"), pages, access, hint)
        self._site.below[RESPONSES] = Route(responses.answer, method="")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        x = Exchange(scope, receive, send)
        began = time.perf_counter()
        try:
            await self._site.answer(x)
        finally:
            level = logging.INFO if x.note else logging.DEBUG
            note = " ".join(f"{name}={value!r}" for name, value in x.note.items() if value)
            seconds = time.perf_counter() - began
            log.log(level, "%s %s %s %.3f s %s", x.method, x.path, x.outcome or x.status, seconds, note)

    async def _generate(self, x: Exchange) -> None:
        await self._calls.answer(x, x.path, await self._body(x), Journey.begun_by(x, bool(self._config.api_keys)))

    # -- the rest of the API ------------------------------------------------------------------------------------------

    async def _count_tokens(self, x: Exchange) -> None:
        call = await self._parsed(anthropic.parse_count, x)
        model = self._catalog.chosen(call.caller.model or None)
        await x.json(anthropic.token_count(await model.generator.count(call)))

    async def _embed(self, x: Exchange) -> None:
        call = await self._parsed(embeddings.parse, x)
        if self._embeddings is None:
            raise InvalidRequest("this server has no embedding model", hint="serve with --embedder minilm")
        vectors, tokens = await self._embeddings.embed(call)
        if x.span is not None:
            x.span.about |= {"gen_ai.request.model": self._embeddings.name, "gen_ai.usage.input_tokens": tokens}
        await x.json(embeddings.render(call, vectors, tokens, self._embeddings.name))

    async def _tokenize(self, x: Exchange) -> None:
        call = await self._parsed(tokenize.parse, x)
        prompts = self._catalog.chosen(call.model or None).generator.prompts
        text, special = (
            (call.prompt, call.add_special_tokens)
            if isinstance(call.prompt, str)
            else (await prompts.rendered(call.prompt), call.prompt.add_special_tokens)
        )
        ids = await prompts.encode(text, add_special=special, param="prompt")
        strings = await asyncio.to_thread(prompts.token_texts, ids) if call.strings else []
        await x.json(tokenize.render(call, ids, strings, prompts.max_context))

    async def _detokenize(self, x: Exchange) -> None:
        call = await self._parsed(tokenize.parse_detokenize, x)
        tokenizer = self._catalog.chosen(call.model or None).generator.prompts.tokenizer
        few = len(call.ids) < LONG_TEXT
        text = _detokenized(tokenizer, call.ids) if few else await asyncio.to_thread(_detokenized, tokenizer, call.ids)
        await x.json(tokenize.render_detokenized(call, text))

    async def _models(self, x: Exchange) -> None:
        await x.json(models.list_models(self.served()))

    async def _model(self, x: Exchange) -> None:
        await x.json(models.retrieve_model(self.served(), x.path.removeprefix("/v1/models/")))

    async def _openapi(self, x: Exchange) -> None:
        await x.json(self._document)

    # -- how it goes ---------------------------------------------------------------------------------------------------

    async def _live(self, x: Exchange) -> None:
        await x.json({"status": "live"})

    async def _ready(self, x: Exchange) -> None:
        ready = self._engine.state is State.READY
        models = (
            {m.name: "awake" if self._engine.is_awake(m.name) else "asleep" for m in self._catalog} if ready else {}
        )
        status = "ready" if ready else self._engine.state.value
        body = {"status": status, "engine_restarts": self._engine.restarts, "models": models}
        await x.json(body, 200 if ready else 503)

    async def _progress(self, x: Exchange) -> None:
        """When the engine was last heard of: a loop that is stuck shows here, though the server is live."""
        engine = self._engine
        moving = engine.state is State.READY and engine.silent_seconds < STUCK
        await x.json(
            {
                "status": "moving" if moving else "stuck" if engine.state is State.READY else engine.state.value,
                "step": sum(stats.step for stats in engine.stats.values()),
                "seconds_since_last_sign": round(engine.silent_seconds, 3),
                "open_requests": engine.num_open,
                "engine_restarts": engine.restarts,
            },
            200 if moving else 503,
        )

    async def _stats(self, x: Exchange) -> None:
        """Of all models together."""
        engine, s = self._engine, Stats.total(self._engine.stats.values())
        await x.json(
            {
                "model": ", ".join(model.name for model in self._catalog),
                "engine_state": engine.state.value,
                "engine_restarts": engine.restarts,
                "uptime_seconds": time.time() - self._began,
                "kv_usage": s.kv_usage,
                "open_requests": engine.num_open,
                **{name: getattr(s, name) for name in s.__slots__ if name != "residency"},
            }
        )

    async def _scrape(self, x: Exchange) -> None:
        models = (f for model in self._catalog for f in self._families(model))
        traced = self._tracing.families() if self._tracing is not None else ()
        text = exposition([*models, self._site.replies.family(), *traced])
        await x.reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _families(self, model: Served) -> Iterator[Family]:
        engine, facts = self._engine, self._engine.ready[model.name]
        model.metrics.started(facts.seconds, facts.weight_bytes, facts.kv_bytes)
        yield from model.metrics.families(
            engine.stats[model.name],
            restarts=engine.restarts,
            ready=engine.state is State.READY,
            block_size=facts.block_size,
            cache=CacheInfo(facts.device, facts.kv_dtype, facts.prefix_cache),
        )
        if (transfer := engine.stats[model.name].transfer) is not None:
            yield from transfer_families(model.metrics.labels, transfer)
        yield from model.metrics.turns(engine.turned[model.name].turns, engine.is_awake(model.name))

    # ------------------------------------------------------------------------------------------------------------------

    async def _parsed(self, parse: Callable[[bytes], T], x: Exchange) -> T:
        """A large body is parsed in another process."""
        body = await self._body(x)
        return parse(body) if len(body) < LARGE else await offload.run(len(body), parse_light, parse, body)

    def _tenant(self, x: Exchange) -> str:
        return Journey.begun_by(x, bool(self._config.api_keys)).tenant

    async def _body(self, x: Exchange) -> bytes:
        return await x.body(self._config.max_body)

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    def served(self) -> list[models.ServedModel]:
        served = [
            models.ServedModel(
                model.name, int(self._began), model.generator.prompts.max_context, sampling=model.defaults
            )
            for model in self._catalog
        ]
        if self._embeddings is not None:
            length = self._embeddings.max_length
            served.append(models.ServedModel(self._embeddings.name, int(self._began), length, kind="embedding"))
        return served


def _detokenized(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    if any(not 0 <= i < tokenizer.vocab_size for i in ids):
        raise InvalidRequest(f"tokens must be in [0, {tokenizer.vocab_size})", param="tokens")
    return tokenizer.decode(ids, skip_special=False)
