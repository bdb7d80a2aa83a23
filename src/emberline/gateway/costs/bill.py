"""Bill: what a reply cost, once its usage is known."""

from __future__ import annotations

from typing import Protocol

from emberline.gateway.call import Call, Reply
from emberline.gateway.costs.cost import Price, cost
from emberline.gateway.costs.estimate import estimated_input
from emberline.gateway.costs.usage import Usage
from emberline.gateway.settings import Settings


class Prices(Protocol):
    def price(self, settings: Settings, provider: str, model: str) -> Price | None:
        """None: not known."""
        ...

    def max_output(self, provider: str, model: str) -> int | None: ...


def input_tokens(call: Call) -> int:
    """About how many its input has."""
    return estimated_input(call.body) if call.surveyed is None else call.surveyed.tokens


def bill(call: Call, reply: Reply, prices: Prices) -> None:
    """What is not known stays unknown."""
    price = None
    for name in (call.model, reply.model):
        if name and (price := prices.price(call.settings, reply.provider, name)) is not None:
            break
    micros = charged(call, reply.usage, price)
    reply.micros = reply.micros if micros is None else micros


def charged(call: Call, usage: Usage | None, price: Price | None) -> int | None:
    """What the caller says it costs counts first. But virtual keys are in other people's hands, and anybody has none:
    where money is counted they cannot make a call cheaper than it is known to be."""
    known = cost(usage, price) if usage is not None else None
    custom = call.options.custom_cost
    if custom is None:
        return known
    said = custom.micros if custom.micros is not None or usage is None else cost(usage, custom.price)
    if said is None or known is None or call.identity.kind == "token" or not _counts_money(call.settings):
        return said
    return max(said, known)


def _counts_money(settings: Settings) -> bool:
    return bool(settings.budgets) or any(rule.get("amount") == "micros" for rule in settings.limits)
