"""The layer that calls a second pool member when the first takes too long.

The reply that begins first is returned and the other call is cancelled. What the cancelled call cost is billed with the
reply; if it had not begun to answer, its input is estimated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

from emberline.core.clock import Clock
from emberline.gateway.call import Attempted, Call, Handler, Layer, Reply
from emberline.gateway.costs.beside import Beside
from emberline.gateway.costs.bill import Prices, input_tokens
from emberline.gateway.costs.cost import cost
from emberline.gateway.costs.usage import Usage
from emberline.gateway.layers.routed import at_step

OUTRUN = "outrun"  # the outcome of the slower attempt


def hedged(prices: Prices, clock: Clock) -> Layer:
    def layer(inner: Handler) -> Handler:
        def handle(call: Call) -> Awaitable[Reply]:
            if call.hedge is None or len(call.steps) < 2:
                return inner(call)
            return _Race(call, inner, prices, clock).run(call.hedge)

        return handle

    return layer


@dataclass(slots=True)
class _Race:
    call: Call
    inner: Handler
    prices: Prices
    clock: Clock
    runners: dict[asyncio.Task[Reply], tuple[Call, float]] = field(default_factory=dict)

    async def run(self, patience: float) -> Reply:
        winner: Reply | None = None
        try:
            first = self._start(self.call)
            await asyncio.wait({first}, timeout=patience)
            if not first.done():
                step = self.call.steps[1]
                self._start(at_step(self.call, step, 1, True).moved(steps=(step,)))
                winner = await self._first()
            winner = winner or first.result()  # raises the error of the first attempt
            extra_cost = await self._stopped(winner)
        except BaseException:  # the client may leave after a reply has begun
            await self._stopped(None)
            raise
        winner.endings.append(extra_cost.add)
        return winner

    def _start(self, call: Call) -> asyncio.Task[Reply]:
        task = asyncio.ensure_future(self.inner(call.moved(hedge=None)))
        self.runners[task] = call, self.clock.now()
        return task

    async def _first(self) -> Reply | None:
        """Return the reply that begins first, or None if every attempt failed."""
        running = set(self.runners)
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in self.runners:
                if task in done and not task.cancelled() and task.exception() is None:
                    return task.result()
        return None

    async def _stopped(self, winner: Reply | None) -> Beside:
        extra_cost = Beside()
        running = [task for task in self.runners if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task, (call, started_at) in self.runners.items():
            if task.cancelled():
                self._outrun(call, started_at, extra_cost)
            elif task.exception() is None and task.result() is not winner:
                await extra_cost.drop(task.result())
        return extra_cost

    def _outrun(self, call: Call, began: float, beside: Beside) -> None:
        seconds, key = self.clock.now() - began, call.options.byok_alias or ""
        call.trail.append(Attempted(call.provider, call.model, call.step, 0, 0, OUTRUN, seconds, key))
        usage = Usage(input=input_tokens(call))
        price = self.prices.price(call.settings, call.provider, call.model)
        beside.count(usage, cost(usage, price), estimated=True)
