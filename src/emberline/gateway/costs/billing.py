"""Billing: computes the cost of a reply from its token usage."""

from __future__ import annotations

import contextlib
from typing import Protocol

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.cost import Price, compute_cost
from emberline.gateway.core.forms import estimate_form_tokens, is_form
from emberline.gateway.core.request import GatewayReply, GatewayRequest
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.core.token_estimate import estimate_input_tokens
from emberline.gateway.core.unified_endpoints import runs_model
from emberline.wire.usage import Usage


class PriceSource(Protocol):
    def price(self, settings: GatewaySettings, provider: str, model: str) -> Price | None:
        """Return the price of a model, or None if it is unknown."""
        ...

    def max_output(self, provider: str, model: str) -> int | None:
        """Return the model's limit on output tokens, or None if it is unknown."""
        ...


def estimate_request_input_tokens(request: GatewayRequest) -> int:
    """Return an estimate of the request's input tokens."""
    if is_form(content_type := request.headers.get("content-type", "")):
        with contextlib.suppress(InvalidRequest):  # a provider's own path takes any body
            return estimate_form_tokens(request.body, content_type)
    return estimate_input_tokens(request.body) if request.body_summary is None else request.body_summary.input_tokens


def set_cost(request: GatewayRequest, reply: GatewayReply, prices: PriceSource) -> None:
    """Set `reply.micros` to the cost of the reply, or leave it unchanged if the cost is unknown."""
    if not runs_model(request):
        reply.micros = 0
        return
    price = None
    for name in (request.model, reply.model):
        if name and (price := prices.price(request.settings, reply.provider, name)) is not None:
            break
    micros = compute_charge(request, reply.usage, price)
    reply.micros = reply.micros if micros is None else micros


def compute_charge(request: GatewayRequest, usage: Usage | None, price: Price | None) -> int | None:
    """Return the cost of a request in micro-dollars, or None if it is unknown.

    A cost that the client states (`custom_cost`) replaces the cost computed from `price`. There is one exception: if
    the gateway has budgets and the caller has no gateway token, the higher of the two costs counts. Virtual keys are
    given to third parties, which could otherwise evade their budget by stating a low cost.
    """
    known = compute_cost(usage, price) if usage is not None else None
    custom = request.options.custom_cost
    if custom is None:
        return known
    claimed = custom.micros if custom.micros is not None or usage is None else compute_cost(usage, custom.price)
    if claimed is None or known is None or request.identity.kind == "token" or not _has_budget(request.settings):
        return claimed
    return max(claimed, known)


def _has_budget(settings: GatewaySettings) -> bool:
    return bool(settings.budgets) or any(rule.get("amount") == "micros" for rule in settings.limits)
