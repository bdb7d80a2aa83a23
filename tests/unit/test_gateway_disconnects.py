"""A client that disconnects at any moment: replies are closed once, calls logged once, and nothing stays reserved."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_requests import Pieces, call

from emberline.core.clock import ManualClock
from emberline.gateway.cache.memory import MemoryCache
from emberline.gateway.core.request import GatewayReply, GatewayRequest
from emberline.gateway.costs.catalogue import CatalogueFiles
from emberline.gateway.costs.price_list import PriceList
from emberline.gateway.layers.caching import CacheLayer
from emberline.gateway.layers.call_logging import log_calls
from emberline.gateway.layers.dynamic_routes import DynamicRouteLayer
from emberline.gateway.layers.errors_to_replies import errors_to_replies
from emberline.gateway.layers.fallbacks import try_fallbacks
from emberline.gateway.layers.guardrail_checks import GuardrailLayer
from emberline.gateway.layers.hedging import hedge_slow_calls
from emberline.gateway.layers.load_balancing import balance_pools
from emberline.gateway.layers.rate_limiting import limit_calls
from emberline.gateway.limits.claims import ClaimBuilder
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.stack import stack_layers
from emberline.wire import sse
from emberline.wire.usage import Usage

ANSWER = {"choices": [{"message": {"content": "safe"}, "delta": {"content": "safe"}}]}
FILES = CatalogueFiles()


def to(**outputs: str) -> dict[str, Any]:
    return {name: {"elementId": id} for name, id in outputs.items()}


ROUTE = [
    {"id": "s", "type": "start", "outputs": to(next="q")},
    {"id": "q", "type": "rate_limit", "properties": {"limitType": "count", "limit": 9, "interval": 60},
     "outputs": to(success="a")},
    {"id": "a", "type": "model", "properties": {"provider": "openai", "model": "a"}, "outputs": to(success="b")},
    {"id": "b", "type": "model", "properties": {"provider": "openai", "model": "b"}, "outputs": to(success="e")},
    {"id": "e", "type": "end"},
]  # fmt: skip
SETTINGS = {
    "cache_ttl": 60,
    "limits": [{"name": "t", "limit": 10**9, "amount": "tokens", "per": "day"}],
    "guardrails": {"judges": [{"name": "j", "provider": "openai", "model": "judge", "prompt": {"S1": "block"},
                               "reply": {"S1": "block"}}]},
    "pools": {"p": {"members": [{"provider": "openai", "model": "x"}, {"provider": "groq", "model": "y"}]}},
    "routes": {"r": {"elements": ROUTE}},
}  # fmt: skip


async def run_steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class SlowCache(MemoryCache):
    async def get(self, key: str) -> bytes | None:
        await run_steps(1)
        return await super().get(key)

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        await run_steps(2)
        await super().put(key, value, ttl_s)


class Providers:
    """Providers that need several event-loop steps to answer, to be cancelled and to close."""

    def __init__(self) -> None:
        self.opened = self.closed = 0

    async def __call__(self, call: GatewayRequest) -> GatewayReply:
        try:
            await run_steps(3 if call.provider == "groq" else 5)
        except asyncio.CancelledError:
            await run_steps(2)
            raise
        reply = GatewayReply(
            200, {}, b"", usage=Usage(input=1, output=1), micros=1, provider=call.provider, step_index=call.step_index
        )
        if call.stream:
            reply.headers["content-type"] = "text/event-stream"
            reply.body = Pieces(sse.encode_data_event(ANSWER), sse.DONE_EVENT, reply=reply)
        else:
            reply.body, reply.ended = sse.dumps(ANSWER), "complete"
        self.opened += 1
        reply.close_callbacks.append(self._end)
        return reply

    async def _end(self, reply: GatewayReply) -> None:
        self.closed += 1
        await run_steps(2)


class Layers:
    """All layers that hold resources during a call."""

    def __init__(self) -> None:
        clock, prices = ManualClock(), PriceList(FILES)
        self.limiter, self.providers = LocalLimiter(), Providers()
        self.cached = CacheLayer(SlowCache(clock), clock)
        self.records: list[Any] = []
        claims = ClaimBuilder(FILES, prices)
        stack = (
            log_calls(self, clock),
            errors_to_replies,
            DynamicRouteLayer(self.limiter, claims, clock, clock).wrap,
            balance_pools(claims, clock),
            lambda inner: lambda call: inner(call.with_changes(hedge_delay_s=0.0) if len(call.steps) > 1 else call),
            limit_calls(self.limiter, FILES, prices, clock, clock),
            GuardrailLayer(try_fallbacks(self.providers), clock).wrap,
            self.cached.wrap,
            hedge_slow_calls(prices, clock),
            try_fallbacks,
        )
        self._handler = stack_layers(stack, self.providers)

    def put(self, record: Any, payload: Any = None) -> None:
        self.records.append(record)

    async def send(self, request: GatewayRequest) -> None:
        reply = await self._handler(request)
        try:
            if not isinstance(reply.body, bytes):
                async for _ in reply.body:
                    await run_steps(1)
            await run_steps(1)
        finally:
            await reply.close()

    @property
    def open_reservations(self) -> int:
        return sum(len(bucket.held) for bucket in self.limiter._buckets.values())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("provider", "model"), [("openai", "m"), ("pool", "p"), ("dynamic", "r")])
def test_disconnect_at_any_step_releases_everything(provider: str, model: str, stream: bool) -> None:
    async def cancel_after(count: int) -> bool:
        """Cancel a call after so many event-loop steps; return False if it had ended by then."""
        layers = Layers()
        request = call({"messages": [{"role": "user", "content": "hi"}]}, provider=provider, model=model, stream=stream,
                     settings=SETTINGS)  # fmt: skip
        request.id = "0" * 32
        task = asyncio.ensure_future(layers.send(request))
        await run_steps(count)
        was_running = task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await run_steps(20)
        state = (len(asyncio.all_tasks()), len(layers.cached._in_flight), layers.open_reservations, len(layers.records))
        assert state == (1, 0, 0, 1), f"after {count} steps"
        assert layers.providers.closed == layers.providers.opened, f"after {count} steps"
        return was_running

    async def run() -> int:
        count = 1
        while await cancel_after(count):
            count += 1
        return count

    assert asyncio.run(run()) > 10
