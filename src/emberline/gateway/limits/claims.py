"""ClaimBuilder: computes what a request claims from each limit that applies to the request.

A limit counts requests, tokens or money. The claim is one request, or the most tokens or money that the request can
use.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.errors import Forbidden
from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.core.unified_endpoints import runs_model
from emberline.gateway.costs.billing import PriceSource, compute_charge, estimate_request_input_tokens
from emberline.gateway.costs.catalogue import CatalogueModel
from emberline.gateway.limits.rule import MAX_LIMIT, Claim, LimitRule
from emberline.wire.usage import Usage

log = logging.getLogger("emberline.gateway.limits")

MAX_BUCKET_NAMES = 4096  # names in the cache
DEFAULT_OUTPUT_TOKENS = 4096  # reserved if neither the request nor the catalogue limits the output


class ModelLookup(Protocol):
    """The interface of Catalogue and CatalogueFiles."""

    def model(self, provider: str, name: str) -> CatalogueModel | None: ...


@dataclass(slots=True)
class ClaimBuilder:
    """Computes which limits apply to a request and how much of each the request needs.

    Parsed rules and bucket names are cached.
    """

    models: ModelLookup
    prices: PriceSource
    _rules_by_gateway: dict[tuple[str, str], tuple[GatewaySettings, tuple[LimitRule, ...]]] = field(
        default_factory=dict
    )
    _bucket_names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def build_claims(self, call: GatewayRequest) -> list[Claim]:
        rules = self._rules_for_settings(call.settings)
        if not rules:
            return []
        facts, key_limits, usage = collect_limit_attributes(call), call.identity.limits, None
        claims = []
        for rule in rules:
            if not rule.applies_to(facts, key_limits):
                continue
            amount: int | None = 1 if rule.amount == "requests" else 0
            if rule.amount != "requests" and runs_model(call):
                usage = usage or self._estimate_max_usage(call)
                amount = usage.total if rule.amount == "tokens" else self._compute_cost_micros(call, usage)
            claims.append(
                Claim(
                    rule, facts["gateway"], self._cached_bucket_name(rule, facts), _amount_to_claim(rule, amount, call)
                )
            )
        return claims

    def _cached_bucket_name(self, rule: LimitRule, attributes: dict[str, str]) -> str:
        """Return the bucket's name. It is cached, because computing the name takes a hash."""
        key = (rule.name, rule.amount, rule.per, rule.technique, *map(attributes.get, rule.split))
        name = self._bucket_names.get(key)
        if name is None:
            if len(self._bucket_names) >= MAX_BUCKET_NAMES:
                self._bucket_names.clear()
            name = self._bucket_names[key] = rule.bucket_name(attributes)
        return name

    def max_cost(self, call: GatewayRequest) -> int | None:
        """Return the most micro-dollars that the request may cost, or None if the price is unknown."""
        return self._compute_cost_micros(call, self._estimate_max_usage(call))

    def _rules_for_settings(self, settings: GatewaySettings) -> tuple[LimitRule, ...]:
        gateway = (settings.account, settings.gateway)
        cached = self._rules_by_gateway.get(gateway)
        if cached is None or cached[0] is not settings:
            cached = self._rules_by_gateway[gateway] = (settings, parse_limit_rules(settings))
        return cached[1]

    def _estimate_max_usage(self, call: GatewayRequest) -> Usage:
        """Return an upper estimate of the tokens that the request can use."""
        model = self.models.model(call.provider, call.model)
        context, limit = (model.context, model.max_output) if model else (None, None)
        output = (
            0
            if call.dialect == "openai-embeddings"
            else min(call.max_output or limit or DEFAULT_OUTPUT_TOKENS, limit or math.inf)
        )
        total_output = min(int(output) * call.choice_count, MAX_LIMIT)
        return Usage(input=int(min(estimate_request_input_tokens(call), context or math.inf)), output=total_output)

    def _compute_cost_micros(self, call: GatewayRequest, usage: Usage) -> int | None:
        return compute_charge(call, usage, self.prices.price(call.settings, call.provider, call.model))


def parse_limit_rules(settings: GatewaySettings) -> tuple[LimitRule, ...]:
    rules = (*LimitRule.parse(settings.limits), *LimitRule.parse(settings.budgets, "micros", "budgets"))
    names = [rule.name for rule in rules]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InvalidRequest(
            f"a limit and a budget have the same name: {repeated[0]!r}", param="budgets", hint="rename one of them"
        )
    return rules


def find_caller_chosen_splits(rule: LimitRule, fixed_metadata: Collection[str]) -> tuple[str, ...]:
    """Return the metadata names in the rule's `split` whose values callers can choose.

    `fixed_metadata`: names whose values the gateway's settings fix.
    """
    names = (each.removeprefix("metadata.") for each in rule.split if each.startswith("metadata."))
    return tuple(name for name in names if name not in fixed_metadata)


def warn_about_evadable_limits(settings: GatewaySettings) -> None:
    """Log a warning for each limit that a caller can evade by sending different metadata."""
    for rule in parse_limit_rules(settings):
        if names := find_caller_chosen_splits(rule, settings.metadata):
            log.warning(
                "Limit can be evaded by a caller that sends different metadata: gateway=%s limit=%s metadata=%s"
                " (hint: set this metadata on every key, because a request cannot change a key's metadata, or add a"
                " limit without split)",
                f"{settings.account}/{settings.gateway}",
                rule.name,
                ",".join(names),
            )


def collect_limit_attributes(call: GatewayRequest) -> dict[str, str]:
    """Return the attributes of a request that limits are split and filtered by: gateway, key, model, ..."""
    facts = {
        "gateway": f"{call.account}/{call.gateway}",
        "key": call.identity.key_id,
        "user": call.identity.user,
        "model": call.model,
        "provider": call.provider,
    }
    for name, value in call.metadata.items():
        facts[f"metadata.{name}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return facts


def _amount_to_claim(rule: LimitRule, amount: int | None, call: GatewayRequest) -> int:
    """Return the amount to claim, which is 0 if `amount` is None because the price is unknown.

    Raise Forbidden if the price is unknown and the budget requires a price.
    """
    if amount is None and rule.unpriced == "refuse":
        raise Forbidden(
            f"budget {rule.name!r} needs a price, and the price of {call.provider}/{call.model} is unknown"[:300],
            hint="set a price for the model, or set unpriced = 'pass' on the budget",
        )
    return amount or 0
