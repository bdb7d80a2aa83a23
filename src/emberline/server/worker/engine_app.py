"""EngineApp: the ASGI application of a server or worker: its routes and their handlers."""

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

STUCK = 30.0  # without a message from the engine; then /health/progress fails


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
        self._handler = Calls(catalog, responses)
        self._embeddings = embeddings
        self._engine.on_stats = lambda name, stats: catalog[name].metrics.stepped(stats)
        self._start_time = time.time()
        self._document = document(__version__)
        self._tracing = tracing
        traced: Callable[[Handler], Handler] = (lambda handler: handler) if tracing is None else tracing.traced
        routes = {
            **{path: Route(traced(self._generate)) for path in PROTOCOLS},
            "/v1/messages/count_tokens": Route(self._count_tokens),
            "/v1/embeddings": Route(traced(self._create_embeddings)),
            "/v1/models": Route(self._list_models, "GET"),
            "/tokenize": Route(self._tokenize),
            "/detokenize": Route(self._detokenize),
            "/stats": Route(self._report_stats, "GET", "operator"),
            "/health": Route(self._report_ready, "GET", "nothing"),
            "/health/live": Route(self._report_live, "GET", "nothing"),
            "/health/ready": Route(self._report_ready, "GET", "nothing"),
            "/health/progress": Route(self._report_progress, "GET", "nothing"),
            "/metrics": Route(self._report_metrics, "GET", "operator"),
            "/openapi.json": Route(self._report_openapi, "GET", "nothing"),
        }
        if config.worker is not None:
            cluster = ClusterCalls(self._handler, config.max_body, keyed=bool(config.api_keys))
            routes["/cluster/resume"] = Route(traced(cluster.resume), needs="cluster")
            routes["/cluster/prefill"] = Route(traced(cluster.prefill), needs="cluster")
            routes["/cluster/events"] = Route(BlockEvents(engine).follow, "GET", "cluster")
        cluster_key = config.worker.cluster_key if config.worker is not None else None
        hint = "/openapi.json lists the endpoints"
        access = Access(config.api_keys, cluster_key, config.closed)
        self._site = Site(routes, Route(self._describe_model, "GET"), pages, access, hint)
        self._site.below[RESPONSES] = Route(responses.answer, method="")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        exchange = Exchange(scope, receive, send)
        began = time.perf_counter()
        try:
            await self._site.answer(exchange)
        finally:
            level = logging.INFO if exchange.note else logging.DEBUG
            note = " ".join(f"{name}={value!r}" for name, value in exchange.note.items() if value)
            seconds = time.perf_counter() - began
            status = exchange.outcome or exchange.status
            log.log(level, "%s %s status=%s seconds=%.3f %s", exchange.method, exchange.path, status, seconds, note)

    async def _generate(self, exchange: Exchange) -> None:
        await self._handler.answer(
            exchange, exchange.path, await self._body(exchange), Journey.begun_by(exchange, bool(self._config.api_keys))
        )

    # -- the rest of the API ------------------------------------------------------------------------------------------

    async def _count_tokens(self, exchange: Exchange) -> None:
        call = await self._parse(anthropic.parse_count, exchange)
        model = self._catalog.chosen(call.caller.model or None)
        await exchange.json(anthropic.token_count(await model.generator.count(call)))

    async def _create_embeddings(self, exchange: Exchange) -> None:
        call = await self._parse(embeddings.parse, exchange)
        if self._embeddings is None:
            raise InvalidRequest("this server has no embedding model", hint="start the server with --embedder minilm")
        vectors, tokens = await self._embeddings.embed(call)
        if exchange.span is not None:
            exchange.span.about |= {"gen_ai.request.model": self._embeddings.name, "gen_ai.usage.input_tokens": tokens}
        await exchange.json(embeddings.render(call, vectors, tokens, self._embeddings.name))

    async def _tokenize(self, exchange: Exchange) -> None:
        call = await self._parse(tokenize.parse, exchange)
        prompts = self._catalog.chosen(call.model or None).generator.prompts
        text, special = (
            (call.prompt, call.add_special_tokens)
            if isinstance(call.prompt, str)
            else (await prompts.rendered(call.prompt), call.prompt.add_special_tokens)
        )
        ids = await prompts.encode(text, add_special=special, param="prompt")
        strings = await asyncio.to_thread(prompts.token_texts, ids) if call.strings else []
        await exchange.json(tokenize.render(call, ids, strings, prompts.max_context))

    async def _detokenize(self, exchange: Exchange) -> None:
        call = await self._parse(tokenize.parse_detokenize, exchange)
        tokenizer = self._catalog.chosen(call.model or None).generator.prompts.tokenizer
        is_short = len(call.ids) < LONG_TEXT
        if is_short:
            text = _detokenize_ids(tokenizer, call.ids)
        else:
            text = await asyncio.to_thread(_detokenize_ids, tokenizer, call.ids)
        await exchange.json(tokenize.render_detokenized(call, text))

    async def _list_models(self, exchange: Exchange) -> None:
        await exchange.json(models.list_models(self.served()))

    async def _describe_model(self, exchange: Exchange) -> None:
        await exchange.json(models.retrieve_model(self.served(), exchange.path.removeprefix("/v1/models/")))

    async def _report_openapi(self, exchange: Exchange) -> None:
        await exchange.json(self._document)

    # -- health, statistics and metrics --------------------------------------------------------------------------------

    async def _report_live(self, exchange: Exchange) -> None:
        await exchange.json({"status": "live"})

    async def _report_ready(self, exchange: Exchange) -> None:
        ready = self._engine.state is State.READY
        models = (
            {m.name: "awake" if self._engine.is_awake(m.name) else "asleep" for m in self._catalog} if ready else {}
        )
        status = "ready" if ready else self._engine.state.value
        body = {"status": status, "engine_restarts": self._engine.restarts, "models": models}
        await exchange.json(body, 200 if ready else 503)

    async def _report_progress(self, exchange: Exchange) -> None:
        """Report the time since the engine's last message: it shows a stalled engine while the server is live."""
        engine = self._engine
        is_progressing = engine.state is State.READY and engine.silent_seconds < STUCK
        stalled = "stuck" if engine.state is State.READY else engine.state.value
        status = "moving" if is_progressing else stalled
        await exchange.json(
            {
                "status": status,
                "step": sum(stats.step for stats in engine.stats.values()),
                "seconds_since_last_sign": round(engine.silent_seconds, 3),
                "open_requests": engine.num_open,
                "engine_restarts": engine.restarts,
            },
            200 if is_progressing else 503,
        )

    async def _report_stats(self, exchange: Exchange) -> None:
        """Reply with the totals of all models."""
        engine, s = self._engine, Stats.total(self._engine.stats.values())
        await exchange.json(
            {
                "model": ", ".join(model.name for model in self._catalog),
                "engine_state": engine.state.value,
                "engine_restarts": engine.restarts,
                "uptime_seconds": time.time() - self._start_time,
                "kv_usage": s.kv_usage,
                "open_requests": engine.num_open,
                **{name: getattr(s, name) for name in s.__slots__ if name != "residency"},
            }
        )

    async def _report_metrics(self, exchange: Exchange) -> None:
        models = (f for model in self._catalog for f in self._metric_families(model))
        traced = self._tracing.families() if self._tracing is not None else ()
        text = exposition([*models, self._site.replies.family(), *traced])
        await exchange.reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _metric_families(self, model: Served) -> Iterator[Family]:
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

    async def _parse(self, parse: Callable[[bytes], T], exchange: Exchange) -> T:
        """Parse the body, a large one in a child process."""
        body = await self._body(exchange)
        return parse(body) if len(body) < LARGE else await offload.run(len(body), parse_light, parse, body)

    def _tenant(self, exchange: Exchange) -> str:
        return Journey.begun_by(exchange, bool(self._config.api_keys)).tenant

    async def _body(self, exchange: Exchange) -> bytes:
        return await exchange.body(self._config.max_body)

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    def served(self) -> list[models.ServedModel]:
        served = [
            models.ServedModel(
                model.name, int(self._start_time), model.generator.prompts.max_context, sampling=model.defaults
            )
            for model in self._catalog
        ]
        if self._embeddings is not None:
            length = self._embeddings.max_length
            served.append(models.ServedModel(self._embeddings.name, int(self._start_time), length, kind="embedding"))
        return served


def _detokenize_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    if any(not 0 <= i < tokenizer.vocab_size for i in ids):
        wrong = next(i for i in ids if not 0 <= i < tokenizer.vocab_size)
        raise InvalidRequest(f"tokens has {wrong}; token ids are in [0, {tokenizer.vocab_size})", param="tokens")
    return tokenizer.decode(ids, skip_special=False)
