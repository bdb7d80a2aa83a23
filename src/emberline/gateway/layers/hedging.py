"""The layer that sends a request to a second pool member when the first is slow (hedging).

The reply that begins first is returned, and the other attempt is cancelled. The cost of the cancelled attempt is added
to the cost of the reply. If the cancelled attempt had not begun to reply, its input tokens are estimated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

from emberline.core.clock import Clock
from emberline.gateway.core.cost import compute_cost
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler, Layer, ProviderAttempt
from emberline.gateway.costs.billing import PriceSource, estimate_request_input_tokens
from emberline.gateway.costs.extra_cost import ExtraCost
from emberline.gateway.layers.fallbacks import call_for_step
from emberline.wire.usage import Usage

HEDGE_LOST = "outrun"  # the outcome of the slower attempt


def hedge_slow_calls(prices: PriceSource, clock: Clock) -> Layer:
    def layer(inner: Handler) -> Handler:
        def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
            if call.hedge_delay_s is None or len(call.steps) < 2:
                return inner(call)
            return _HedgedCall(call, inner, prices, clock).run(call.hedge_delay_s)

        return handle

    return layer


@dataclass(slots=True)
class _HedgedCall:
    call: GatewayRequest
    inner: Handler
    prices: PriceSource
    clock: Clock
    attempts: dict[asyncio.Task[GatewayReply], tuple[GatewayRequest, float]] = field(default_factory=dict)

    async def run(self, hedge_after_s: float) -> GatewayReply:
        winner: asyncio.Task[GatewayReply] | None = None
        try:
            first = self._start_call(self.call)
            await asyncio.wait({first}, timeout=hedge_after_s)
            if not first.done():
                step = self.call.steps[1]
                self._start_call(call_for_step(self.call, step, 1, True).with_changes(steps=(step,)))
                winner = await self._wait_for_first_reply()
            winner = winner or first
            reply = winner.result()  # raises the error of the first attempt
            extra_cost = await self._cancel_other_calls(reply)
        except BaseException:  # the client may leave after a reply has begun
            await self._cancel_other_calls(None)
            raise
        self.call.reply_headers.update(self.attempts[winner][0].reply_headers)
        reply.close_callbacks.append(extra_cost.add_to_reply)
        return reply

    def _start_call(self, call: GatewayRequest) -> asyncio.Task[GatewayReply]:
        """Start an attempt, which collects its own reply headers: only those of the winner are for the client."""
        own_call = call.with_changes(hedge_delay_s=None, reply_headers={})
        task = asyncio.ensure_future(self.inner(own_call))
        self.attempts[task] = own_call, self.clock.now()
        return task

    async def _wait_for_first_reply(self) -> asyncio.Task[GatewayReply] | None:
        """Return the attempt whose reply begins first, or None if every attempt failed."""
        running = set(self.attempts)
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in self.attempts:
                if task in done and not task.cancelled() and task.exception() is None:
                    return task
        return None

    async def _cancel_other_calls(self, winner: GatewayReply | None) -> ExtraCost:
        extra_cost = ExtraCost()
        running = [task for task in self.attempts if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task, (call, started_at) in self.attempts.items():
            if task.cancelled():
                self._bill_cancelled_call(call, started_at, extra_cost)
            elif task.exception() is None and task.result() is not winner:
                await extra_cost.discard_reply(task.result())
        return extra_cost

    def _bill_cancelled_call(self, call: GatewayRequest, started_at: float, extra_cost: ExtraCost) -> None:
        seconds, key = self.clock.now() - started_at, call.options.byok_alias or ""
        call.attempts.append(
            ProviderAttempt(call.provider, call.model, call.step_index, 0, 0, HEDGE_LOST, seconds, key)
        )
        usage = Usage(input=estimate_request_input_tokens(call))
        price = self.prices.price(call.settings, call.provider, call.model)
        extra_cost.add_usage(usage, compute_cost(usage, price), estimated=True)
