"""Bill: what a reply cost, once its usage is known."""

from __future__ import annotations

from typing import Protocol

from emberline.gateway.call import Call, Reply
from emberline.gateway.costs.cost import Price, cost
from emberline.gateway.settings import Settings


class Prices(Protocol):
    def price(self, settings: Settings, provider: str, model: str) -> Price | None:
        """None: not known."""
        ...

    def max_output(self, provider: str, model: str) -> int | None: ...


def bill(call: Call, reply: Reply, prices: Prices) -> None:
    """What the caller says it costs counts first; what is not known stays unknown."""
    custom = call.options.custom_cost
    if custom is not None and custom.micros is not None:
        reply.micros = custom.micros
    elif reply.usage is not None:
        own = custom.price if custom is not None else None
        names = (call.model, reply.model)
        found = (prices.price(call.settings, reply.provider, name) for name in names if name)
        reply.micros = cost(reply.usage, own or next((price for price in found if price is not None), None))
