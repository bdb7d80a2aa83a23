"""serve: everything a serving process is made of, put together and run until it is told to stop."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import replace
from pathlib import Path

import uvicorn

from emberline import __version__
from emberline.api import reasoning, toolstyle
from emberline.core.config import EngineConfig, ServerConfig, core_count
from emberline.core.errors import UnsupportedModel
from emberline.engine.grammar_guard import GrammarGuard
from emberline.engine.stream import AsyncEngine
from emberline.hub.source import resolve
from emberline.server.embeddings import Embeddings
from emberline.server.engine_app import EngineApp
from emberline.server.generator import Generator
from emberline.server.metrics import Metrics
from emberline.server.pages import load_pages
from emberline.server.prompts import Prompts
from emberline.tokens.template import ChatTemplate
from emberline.tokens.tokenizer import Tokenizer

log = logging.getLogger("emberline.server")


async def serve(config: ServerConfig, engine_config: EngineConfig, began: float) -> None:
    directory = await asyncio.to_thread(resolve, config.model)
    engine = AsyncEngine(replace(engine_config, model=str(directory)), stall_timeout=config.stall_timeout)
    starting = asyncio.create_task(engine.start())  # the engine's process loads while we read the tokenizer
    await asyncio.sleep(0)
    app = None
    try:
        name = config.served_name or config.model
        tokenizer = await asyncio.to_thread(Tokenizer.load, directory)
        template = _template(directory, config)
        embeddings = await _embeddings(config)
        metrics = Metrics(name)
        await starting
        assert engine.ready is not None
        sources = "".join(template.sources.values()) if template else ""
        tool_style = toolstyle.style_for(sources, config.tool_style)
        guard = GrammarGuard(directory / "tokenizer.json", engine.ready.vocab_size, sorted(tokenizer.eos_ids))
        generator = Generator(
            engine,
            Prompts(tokenizer, template, tool_style, engine.ready.max_context),
            guard,
            metrics,
            served_name=name,
            tool_style=tool_style,
            reasoning=reasoning.style_for(sources),
            timeout=config.request_timeout,
        )
        fingerprint = "fp_" + hashlib.sha256(f"{__version__}/{directory.name}".encode()).hexdigest()[:12]
        app = EngineApp(config, generator, embeddings, metrics, load_pages(), fingerprint)
        phases = ", ".join(f"{k} {v:.2f} s" for k, v in engine.ready.seconds.items())
        log.info(
            "%s: context %d, %d KV tokens, %.0f MB of weights, %.0f MB of cache; kernels: %s",
            name,
            engine.ready.max_context,
            engine.ready.kv_tokens,
            engine.ready.weight_bytes / 1e6,
            engine.ready.kv_bytes / 1e6,
            engine.ready.kernels,
        )
        log.info("ready in %.2f s (%s) at http://%s:%d", time.monotonic() - began, phases, config.host, config.port)
        warming = asyncio.create_task(asyncio.to_thread(guard.start))  # so that the first grammar need not wait for it
        await _listen(app, config)
        await warming
    finally:
        starting.cancel()
        await engine.stop()
        if app is not None:
            guard.close()
            if embeddings is not None:
                embeddings.stop()


async def _listen(app: EngineApp, config: ServerConfig) -> None:
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=10,
    )
    await uvicorn.Server(settings).serve()


def _template(directory: Path, config: ServerConfig) -> ChatTemplate | None:
    try:
        return ChatTemplate.load(directory, Path(config.chat_template) if config.chat_template else None)
    except UnsupportedModel as e:
        log.warning("%s", e)
        return None  # completions work without


async def _embeddings(config: ServerConfig) -> Embeddings | None:
    if config.embedder is None:
        return None
    directory = await asyncio.to_thread(resolve, config.embedder)
    return Embeddings(config.embedder, directory, core_count())
