"""The semantic cache with the real embedding model of the engine: paraphrases are served, opposites are not."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway_requests import call

from emberline.core.clock import SystemClock
from emberline.gateway.cache.embedder import HttpEmbedder
from emberline.gateway.cache.factory import semantic_cache_factory
from emberline.gateway.cache.memory import MemoryCache
from emberline.gateway.cache.semantic import SemanticCache
from emberline.gateway.core.request import GatewayReply, GatewayRequest
from emberline.gateway.layers.caching import CacheLayer
from emberline.gateway.upstream.client import UpstreamClient

SETTINGS = {"cache_ttl": 600, "semantic": {"mode": "on", "threshold": 0.85}}


def request_body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def test_semantic_cache_serves_paraphrases_only(server: str) -> None:
    async def run() -> None:
        async with UpstreamClient() as upstream:
            embedder = HttpEmbedder(upstream, server, "minilm", timeout_s=60.0)  # the first call starts the embedder
            semantic = SemanticCache(embedder, SystemClock())
            handler = CacheLayer(MemoryCache(SystemClock()), SystemClock(), lambda: semantic).wrap(answer)

            async def hit(text: str) -> bool:
                reply = await handler(call(request_body(text), settings=SETTINGS, deadline=1e12))
                await reply.close()
                return reply.cached

            assert not await hit("How do I enable two-factor authentication?")
            assert await hit("How can I enable two-factor authentication?")
            assert not await hit("How do I disable two-factor authentication?")
            assert not await hit("How do I reset my password?")
            assert not await hit("What does the plan with 5 seats cost?")
            assert not await hit("What does the plan with 50 seats cost?")
            assert embedder.failures == 0
            semantic_cache = semantic_cache_factory(upstream, server, "minilm", SystemClock())()
            request = call(request_body("hello"), settings=SETTINGS)
            for _ in range(20):  # its embedder has half a second, which is short on a busy machine
                if (found := await semantic_cache.look_up(request)) is not None:
                    break
            assert found is not None
            unreachable = HttpEmbedder(upstream, "http://127.0.0.1:9", "minilm")
            assert await unreachable.embed(["x"]) is None and unreachable.failures == 1
            unknown_model = HttpEmbedder(upstream, server, "unheard-of")
            assert await unknown_model.embed(["x"]) is None and unknown_model.failures == 1

    asyncio.run(run())


async def answer(call: GatewayRequest) -> GatewayReply:
    return GatewayReply(200, {}, b"{}")
