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

    A cost that the client states (`custom_cost`) replaces the cost computed from `price`. The permissions layer has
    checked that the caller's key may state costs.
    """
    custom = request.options.custom_cost
    if custom is None:
        return compute_cost(usage, price) if usage is not None else None
    return custom.micros if custom.micros is not None or usage is None else compute_cost(usage, custom.price)
