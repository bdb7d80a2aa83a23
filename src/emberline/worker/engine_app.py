"""EngineApp: the ASGI application of a server or worker. It has a handler for each path."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from emberline import __version__
from emberline.api import tokenize
from emberline.api.anthropic import request as anthropic
from emberline.api.call import ChatCall, EmbeddingCall
from emberline.api.openai import embeddings, models
from emberline.api.openapi import build_document
from emberline.cluster.resumable_streams import RECLAIM_PATH, ResumableStreams
from emberline.core.config import ServerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Stats
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.core.tls import TLSIdentity
from emberline.engine.async_engine import AsyncEngine, EngineState
from emberline.server.access import AccessPolicy
from emberline.server.exchange import Exchange, Receive, Scope, Send
from emberline.server.metrics import CacheInfo, MetricFamily, listener_families, render_exposition, tls_families
from emberline.server.pages import StaticPage
from emberline.server.route_table import Handler, HTTPRoute, RouteTable
from emberline.server.tracing import RequestTracing
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker.block_events import BlockEventStream
from emberline.worker.catalog import LoadedModel, ModelCatalog
from emberline.worker.cluster_handler import ClusterHandler
from emberline.worker.generation_handler import GenerationHandler
from emberline.worker.ignored_fields import IgnoredFieldPolicy
from emberline.worker.ollama_handler import OllamaHandler
from emberline.worker.on_demand_embedder import AnyEmbeddingModel
from emberline.worker.prompt_builder import LONG_TEXT_CHARS
from emberline.worker.protocols import PROTOCOLS, parse_with_result_limit
from emberline.worker.rank_metrics import build_expert_metrics, build_rank_metrics
from emberline.worker.request_context import RequestContext
from emberline.worker.response_store import ResponseStore
from emberline.worker.stored_responses import RESPONSE_PATH_PREFIX as RESPONSES
from emberline.worker.stored_responses import StoredResponses
from emberline.worker.transfer_metrics import build_transfer_metrics

log = logging.getLogger("emberline.server")

T = TypeVar("T")
AnyCall = TypeVar("AnyCall", ChatCall, EmbeddingCall)

STALL_TIMEOUT_S = 30.0  # without a message from the engine; then /health/progress fails


class EngineApp:
    def __init__(
        self,
        config: ServerConfig,
        engine: AsyncEngine,
        catalog: ModelCatalog,
        embedding_model: AnyEmbeddingModel | None,
        pages: dict[str, StaticPage],
        tracing: RequestTracing | None = None,
        response_store: ResponseStore | None = None,
        tls: TLSIdentity | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._catalog = catalog
        responses = StoredResponses(response_store, self._tenant_of)
        self.incarnation = uuid.uuid4().hex
        self._ignored_fields = IgnoredFieldPolicy(refuses_unknown=config.strict)
        streams = ResumableStreams(self.incarnation, time.monotonic)
        self._handler = GenerationHandler(catalog, responses, streams, self._ignored_fields)
        self._embeddings = embedding_model
        self._ollama = OllamaHandler(
            catalog,
            embedding_model,
            self._handler,
            self._ignored_fields,
            self._parse_body,
            self._read_body,
            self._make_context,
        )
        self._engine.on_stats = lambda name, stats: catalog[name].metrics.record_step(stats)
        self._start_time = time.time()
        self._ready_at = time.monotonic()  # the wall clock may be set
        self._tracing = tracing
        self.extra_metrics: Callable[[], Iterable[MetricFamily]] = tuple  # of the registration with routers
        self._tls = tls
        traced: Callable[[Handler], Handler] = (lambda handler: handler) if tracing is None else tracing.trace_handler
        routes = {
            **{path: HTTPRoute(traced(self._generate)) for path in PROTOCOLS},
            **self._ollama.routes(traced),
            "/v1/messages/count_tokens": HTTPRoute(self._count_tokens),
            "/v1/embeddings": HTTPRoute(traced(self._create_embeddings)),
            "/v1/models": HTTPRoute(self._list_models, "GET"),
            "/tokenize": HTTPRoute(self._tokenize),
            "/detokenize": HTTPRoute(self._detokenize),
            "/stats": HTTPRoute(self._report_stats, "GET", "operator"),
            "/health": HTTPRoute(self._report_ready, "GET", "nothing"),
            "/health/live": HTTPRoute(self._report_live, "GET", "nothing"),
            "/health/ready": HTTPRoute(self._report_ready, "GET", "nothing"),
            "/health/progress": HTTPRoute(self._report_progress, "GET", "nothing"),
            "/metrics": HTTPRoute(self._report_metrics, "GET", "operator"),
            "/openapi.json": HTTPRoute(self._report_openapi, "GET", "nothing"),
        }
        if config.worker is not None:
            set_asleep = engine.set_asleep if config.worker.can_sleep else None
            cluster = ClusterHandler(self._handler, config.max_body, bool(config.api_keys), set_asleep)
            routes["/cluster/sleep"] = HTTPRoute(cluster.sleep, required_key="cluster")
            routes["/cluster/resume"] = HTTPRoute(traced(cluster.resume), required_key="cluster")
            routes[RECLAIM_PATH] = HTTPRoute(cluster.reclaim, required_key="cluster")
            routes["/cluster/prefill"] = HTTPRoute(traced(cluster.prefill), required_key="cluster")
            routes["/cluster/events"] = HTTPRoute(BlockEventStream(engine).handle, "GET", "cluster")
        cluster_keys = config.cluster_keys if config.worker is not None else ()
        hint = "/openapi.json lists the endpoints"
        tls_config = config.tls if config.worker else None
        access = AccessPolicy(config.api_keys, cluster_keys, config.closed, config.admin_keys, tls_config)
        self._site = RouteTable(routes, HTTPRoute(self._describe_model, "GET"), pages, access, hint)
        self._site.prefix_routes[RESPONSES] = HTTPRoute(responses.handle, method="")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        exchange = Exchange(scope, receive, send)
        start = time.perf_counter()
        try:
            await self._site.handle(exchange)
        finally:
            level = logging.INFO if exchange.log_fields else logging.DEBUG
            note = " ".join(f"{name}={value!r}" for name, value in exchange.log_fields.items() if value)
            seconds = time.perf_counter() - start
            status = exchange.logged_status or exchange.status
            facts = (exchange.method, exchange.path, status, seconds, note)
            log.log(level, "Request: method=%s path=%s status=%s seconds=%.3f %s", *facts)

    def add_routes(self, routes: Mapping[str, HTTPRoute]) -> None:
        self._site.routes.update(routes)

    async def _generate(self, exchange: Exchange) -> None:
        await self._handler.handle(
            exchange,
            exchange.path,
            await self._read_body(exchange),
            self._make_context(exchange),
        )

    # -- the rest of the API ------------------------------------------------------------------------------------------

    async def _count_tokens(self, exchange: Exchange) -> None:
        call = self._with_tenant(await self._parse_body(anthropic.parse_count_tokens, exchange), exchange)
        headers = self._ignored_fields.apply(call.ignored)
        model = self._catalog.select(call.common.model or None)
        count = await model.generator.count_prompt_tokens(call)
        await exchange.reply_json(anthropic.render_token_count(count), headers=headers)

    async def _create_embeddings(self, exchange: Exchange) -> None:
        call = self._with_tenant(await self._parse_body(embeddings.parse, exchange), exchange)
        headers = self._ignored_fields.apply(call.ignored)
        if self._embeddings is None:
            raise InvalidRequest("this server has no embedding model", hint="start the server with --embedder minilm")
        vectors, tokens = await exchange.run_while_connected(self._embeddings.embed(call))
        if exchange.span is not None:
            exchange.span.attributes |= {
                "gen_ai.request.model": self._embeddings.name,
                "gen_ai.usage.input_tokens": tokens,
            }
        await exchange.reply_json(embeddings.render(call, vectors, tokens, self._embeddings.name), headers=headers)

    async def _tokenize(self, exchange: Exchange) -> None:
        call = await self._parse_body(tokenize.parse, exchange)
        headers = self._ignored_fields.apply(call.ignored)
        prompts = self._catalog.select(call.model or None).generator.prompt_builder
        tenant = self._tenant_of(exchange)
        if isinstance(call.prompt, str):
            text, special = call.prompt, call.add_special_tokens
        else:
            text = await prompts.render_off_loop(self._with_tenant(call.prompt, exchange))
            special = call.prompt.add_special_tokens
        ids = await prompts.encode(text, tenant, add_special=special, param="prompt")
        strings = await prompts.run_in_thread(tenant, prompts.token_texts, ids) if call.returns_strings else []
        await exchange.reply_json(tokenize.render(call, ids, strings, prompts.max_context), headers=headers)

    async def _detokenize(self, exchange: Exchange) -> None:
        call = await self._parse_body(tokenize.parse_detokenize, exchange)
        headers = self._ignored_fields.apply(call.ignored)
        prompts = self._catalog.select(call.model or None).generator.prompt_builder
        if len(call.ids) < LONG_TEXT_CHARS:
            text = _detokenize_ids(prompts.tokenizer, call.ids)
        else:
            tenant = self._tenant_of(exchange)
            text = await prompts.run_in_thread(tenant, _detokenize_ids, prompts.tokenizer, call.ids)
        await exchange.reply_json(tokenize.render_detokenized(call, text), headers=headers)

    async def _list_models(self, exchange: Exchange) -> None:
        await exchange.reply_json(models.list_models(self.served_models()))

    async def _describe_model(self, exchange: Exchange) -> None:
        await exchange.reply_json(
            models.retrieve_model(self.served_models(), exchange.path.removeprefix("/v1/models/"))
        )

    @cached_property
    def _document(self) -> dict[str, Any]:
        return build_document(__version__)  # takes 40 ms, too long for the start

    async def _report_openapi(self, exchange: Exchange) -> None:
        await exchange.reply_json(self._document)

    # -- health, statistics and metrics --------------------------------------------------------------------------------

    async def _report_live(self, exchange: Exchange) -> None:
        await exchange.reply_json({"status": "live"})

    async def _report_ready(self, exchange: Exchange) -> None:
        ready = self._engine.state is EngineState.READY
        models = (
            {m.name: "awake" if m.generator.engine.is_awake(m.name) else "asleep" for m in self._catalog}
            if ready
            else {}
        )
        status = "ready" if ready else self._engine.state.value
        body = {"status": status, "engine_restarts": self._engine.restarts, "models": models}
        await exchange.reply_json(body, 200 if ready else 503)

    async def _report_progress(self, exchange: Exchange) -> None:
        """Report the time since the engine's last message. A long time shows that the engine is stalled."""
        engine = self._engine
        is_progressing = engine.state is EngineState.READY and engine.seconds_without_message < STALL_TIMEOUT_S
        stalled = "stuck" if engine.state is EngineState.READY else engine.state.value
        status = "moving" if is_progressing else stalled
        await exchange.reply_json(
            {
                "status": status,
                "step": sum(stats.step for stats in engine.stats.values()),
                "seconds_since_last_sign": round(engine.seconds_without_message, 3),
                "open_requests": engine.num_open_submissions,
                "engine_restarts": engine.restarts,
            },
            200 if is_progressing else 503,
        )

    async def _report_stats(self, exchange: Exchange) -> None:
        """Reply with the engine's statistics, added up over all models."""
        engine = self._engine
        s = Stats.total(model.generator.engine.stats[model.name] for model in self._catalog)
        await exchange.reply_json(
            {
                "model": ", ".join(model.name for model in self._catalog),
                "engine_state": engine.state.value,
                "engine_restarts": engine.restarts,
                "uptime_seconds": time.monotonic() - self._ready_at,
                "dashboard": self._config.dashboard,
                "kv_usage": s.kv_usage,
                "open_requests": engine.num_open_submissions,
                "ranks": {name: info.ranks for name, info in engine.model_info.items() if info.ranks},
                **{name: getattr(s, name) for name in s.__slots__ if name != "residency"},
            }
        )

    async def _report_metrics(self, exchange: Exchange) -> None:
        models = (f for model in self._catalog for f in self._metric_families(model))
        traced = self._tracing.families() if self._tracing is not None else ()
        counters = self._site.reply_counter, self._site.wrong_keys, self._ignored_fields
        others = (*traced, *self.extra_metrics(), *tls_families(self._tls), *listener_families())
        text = render_exposition([*models, *(counter.family() for counter in counters), *others])
        await exchange.reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _metric_families(self, model: LoadedModel) -> Iterator[MetricFamily]:
        engine = model.generator.engine
        info = engine.model_info[model.name]
        model.metrics.record_engine_start(info.seconds, info.weight_bytes, info.kv_bytes)
        yield from model.metrics.families(
            engine.stats[model.name],
            restart_count=engine.restarts,
            is_ready=engine.state is EngineState.READY,
            block_size=info.block_size,
            cache=CacheInfo(info.device, info.kv_dtype, info.prefix_cache, info.kv_groups),
        )
        if info.ranks:
            yield from build_rank_metrics(model.metrics.labels, info.ranks)
        if (experts := engine.stats[model.name].experts) is not None:
            yield from build_expert_metrics(model.metrics.labels, experts)
        if (transfer := engine.stats[model.name].transfer) is not None:
            yield from build_transfer_metrics(model.metrics.labels, transfer)
        yield from model.metrics.build_sleep_metrics(engine.sleep_states[model.name].turns, engine.is_awake(model.name))

    # ------------------------------------------------------------------------------------------------------------------

    async def _parse_body(self, parse: Callable[[bytes], T], exchange: Exchange) -> T:
        """Return the parsed body of the request. A large body is parsed in a child process."""
        body = await self._read_body(exchange)
        return (
            parse(body)
            if len(body) < LARGE_INPUT_BYTES
            else await offload.run(len(body), parse_with_result_limit, parse, body)
        )

    def _with_tenant(self, call: AnyCall, exchange: Exchange) -> AnyCall:
        return replace(call, common=replace(call.common, tenant=self._tenant_of(exchange)))

    def _tenant_of(self, exchange: Exchange) -> str:
        return self._make_context(exchange).tenant

    def _make_context(self, exchange: Exchange) -> RequestContext:
        return RequestContext.from_exchange(exchange, bool(self._config.api_keys))

    async def _read_body(self, exchange: Exchange) -> bytes:
        return await exchange.read_body(self._config.max_body)

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    def served_models(self) -> list[models.ServedModel]:
        served = [
            models.ServedModel(
                model.name,
                int(self._start_time),
                model.generator.prompt_builder.max_context,
                sampling_defaults=model.sampling_defaults,
            )
            for model in self._catalog
        ]
        if self._embeddings is not None:
            embedder, created = self._embeddings, int(self._start_time)
            served.append(
                models.ServedModel(
                    embedder.name, created, embedder.max_tokens, kind="embedding", description=embedder.description
                )
            )
        return served


def _detokenize_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    if any(not 0 <= i < tokenizer.vocab_size for i in ids):
        wrong = next(i for i in ids if not 0 <= i < tokenizer.vocab_size)
        what = f"tokens has {wrong}; token ids are in [0, {tokenizer.vocab_size})"
        raise InvalidRequest(what, param="tokens", hint="POST /tokenize returns the ids of a text")
    return tokenizer.decode(ids, skip_special=False)
