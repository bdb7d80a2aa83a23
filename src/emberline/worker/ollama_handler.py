"""OllamaHandler: replies to the requests of Ollama's API, on the models of this server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from emberline.api.call import EmbeddingCall
from emberline.api.ollama import embed, models
from emberline.api.ollama.reply import render_loaded
from emberline.api.ollama.request import parse_load_request
from emberline.core.errors import InvalidRequest
from emberline.server.exchange import Exchange
from emberline.server.route_table import Handler, HTTPRoute
from emberline.worker.catalog import LoadedModel, ModelCatalog
from emberline.worker.generation_handler import GenerationHandler
from emberline.worker.ignored_fields import IgnoredFieldPolicy
from emberline.worker.model_summary import summarize_chat_model, summarize_embedder
from emberline.worker.on_demand_embedder import AnyEmbeddingModel
from emberline.worker.protocols import OLLAMA_CHAT_PATH, OLLAMA_GENERATE_PATH
from emberline.worker.request_context import RequestContext

MAX_LOAD_REQUEST_BYTES = 4096  # a larger body has a prompt

T = TypeVar("T")


class ParseBody(Protocol):
    """Reads and parses the body of a request, a large one in a child process."""

    async def __call__(self, parse: Callable[[bytes], T], exchange: Exchange) -> T: ...


ReadBody = Callable[[Exchange], Awaitable[bytes]]
MakeContext = Callable[[Exchange], RequestContext]


class OllamaHandler:
    def __init__(
        self,
        catalog: ModelCatalog,
        embedding_model: AnyEmbeddingModel | None,
        generation: GenerationHandler,
        ignored_fields: IgnoredFieldPolicy,
        parse_body: ParseBody,
        read_body: ReadBody,
        make_context: MakeContext,
    ) -> None:
        self._catalog = catalog
        self._embeddings = embedding_model
        self._generation = generation
        self._ignored_fields = ignored_fields
        self._parse_body = parse_body
        self._read_body = read_body
        self._make_context = make_context
        self._started_at = int(time.time())
        self._summaries: dict[str, models.OllamaModel] = {}  # by the name of the model

    def routes(self, traced: Callable[[Handler], Handler]) -> dict[str, HTTPRoute]:
        """Return the routes. Ollama's documentation calls them with curl, which sends no content-type of JSON."""
        handlers: dict[str, Handler] = {
            OLLAMA_CHAT_PATH: traced(self._generate),
            OLLAMA_GENERATE_PATH: traced(self._generate),
            "/api/embed": traced(self._embed),
            "/api/embeddings": traced(self._embed_one),
            "/api/show": self._show,
        }
        return {
            **{path: HTTPRoute(handler, requires_json=False) for path, handler in handlers.items()},
            "/api/tags": HTTPRoute(self._list_models, "GET"),
            "/api/ps": HTTPRoute(self._list_loaded, "GET"),
            "/api/version": HTTPRoute(self._report_version, "GET", "nothing"),
        }

    async def _generate(self, exchange: Exchange) -> None:
        body = await self._read_body(exchange)
        is_chat = exchange.path == OLLAMA_CHAT_PATH
        if len(body) <= MAX_LOAD_REQUEST_BYTES:
            load = parse_load_request(body, is_chat=is_chat)
            if load is not None:
                model = self._catalog.select(load.model or None)
                await exchange.reply_json(render_loaded(load, model.name, time.time(), is_chat=is_chat))
                return
        await self._generation.handle(exchange, exchange.path, body, self._make_context(exchange))

    # -- embeddings ---------------------------------------------------------------------------------------------------

    async def _embed(self, exchange: Exchange) -> None:
        call = self._with_tenant(await self._parse_body(embed.parse_embed, exchange), exchange)
        headers = self._ignored_fields.apply(call.ignored)
        started_at = time.monotonic_ns()
        model = self._require_embedder()
        vectors, tokens = await exchange.run_while_connected(model.embed(call)) if call.inputs else ((), 0)
        duration = max(1, time.monotonic_ns() - started_at)
        self._record_embedding(exchange, model, tokens)
        body = embed.render_embed(call, vectors, tokens, model.name, duration)
        await exchange.reply_json(body, headers=headers)

    async def _embed_one(self, exchange: Exchange) -> None:
        call = self._with_tenant(await self._parse_body(embed.parse_embeddings, exchange), exchange)
        headers = self._ignored_fields.apply(call.ignored)
        model = self._require_embedder()
        vectors, tokens = await exchange.run_while_connected(model.embed(call))
        self._record_embedding(exchange, model, tokens)
        await exchange.reply_json(embed.render_embeddings(vectors), headers=headers)

    def _with_tenant(self, call: EmbeddingCall, exchange: Exchange) -> EmbeddingCall:
        return replace(call, common=replace(call.common, tenant=self._make_context(exchange).tenant))

    def _require_embedder(self) -> AnyEmbeddingModel:
        if self._embeddings is None:
            raise InvalidRequest("this server has no embedding model", hint="start the server with --embedder minilm")
        return self._embeddings

    def _record_embedding(self, exchange: Exchange, model: AnyEmbeddingModel, tokens: int) -> None:
        if exchange.span is not None:
            exchange.span.attributes |= {"gen_ai.request.model": model.name, "gen_ai.usage.input_tokens": tokens}

    # -- models -------------------------------------------------------------------------------------------------------

    async def _list_models(self, exchange: Exchange) -> None:
        await exchange.reply_json(models.list_models(await self._summarize_all()))

    async def _list_loaded(self, exchange: Exchange) -> None:
        await exchange.reply_json(models.list_loaded_models(await self._summarize_all()))

    async def _show(self, exchange: Exchange) -> None:
        name = await self._parse_body(models.parse_show, exchange)
        embedder = self._embeddings
        is_embedder = embedder is not None and name.removesuffix(models.DEFAULT_TAG) == embedder.name
        served = embedder if is_embedder and embedder is not None else self._catalog[name]
        await exchange.reply_json(models.render_description(await self._summarize(served)))

    async def _report_version(self, exchange: Exchange) -> None:
        await exchange.reply_json({"version": models.API_VERSION})

    async def _summarize_all(self) -> list[models.OllamaModel]:
        """Return summaries of all models, first those that generate text: clients take the first."""
        embedders = [self._embeddings] if self._embeddings is not None else []
        return [await self._summarize(model) for model in (*self._catalog, *embedders)]

    async def _summarize(self, model: LoadedModel | AnyEmbeddingModel) -> models.OllamaModel:
        """Return the summary of a model. The headers of a large checkpoint take up to a second, so they are read
        once, in a thread."""
        if (summary := self._summaries.get(model.name)) is None:
            if isinstance(model, LoadedModel):
                summary = await asyncio.to_thread(summarize_chat_model, model, self._started_at)
            else:
                summary = await asyncio.to_thread(summarize_embedder, model, self._started_at)
            if summary.num_bytes:  # 0: an embedder that is not downloaded yet
                self._summaries[model.name] = summary
        return summary
