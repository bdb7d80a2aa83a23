"""ClaimBuilder: what a call claims from each limit that applies to it.

That is one request, and the most tokens or money that it can use."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from emberline.core.errors import InvalidRequest
from emberline.gateway.call import Call
from emberline.gateway.costs.bill import Prices, charged, input_tokens
from emberline.gateway.costs.catalogue import Model
from emberline.gateway.costs.usage import Usage
from emberline.gateway.errors import Forbidden
from emberline.gateway.limits.rule import MOST, Claim, Rule
from emberline.gateway.settings import Settings

log = logging.getLogger("emberline.gateway.limits")

MOST_BUCKETS = 4096  # names in the cache
UNSAID = 4096  # reserved if neither the request nor the catalogue limits the output


class Sizes(Protocol):
    """A model catalogue, or the files of one."""

    def model(self, provider: str, name: str) -> Model | None: ...


@dataclass(slots=True)
class Claims:
    """Builds the claims of calls, with caches for parsed rules and bucket names."""

    sizes: Sizes
    prices: Prices
    _read: dict[tuple[str, str], tuple[Settings, tuple[Rule, ...]]] = field(default_factory=dict)
    _buckets: dict[tuple[object, ...], str] = field(default_factory=dict)

    def of(self, call: Call) -> list[Claim]:
        rules = self._rules(call.settings)
        if not rules:
            return []
        facts, key_limits, usage = facts_of(call), call.identity.limits, None
        claims = []
        for rule in rules:
            if not rule.holds(facts, key_limits):
                continue
            amount: int | None = 1
            if rule.amount != "requests":
                usage = usage or self._most(call)
                amount = usage.total if rule.amount == "tokens" else self._micros(call, usage)
            claims.append(Claim(rule, facts["gateway"], self._bucket(rule, facts), _known(rule, amount, call)))
        return claims

    def _bucket(self, rule: Rule, facts: dict[str, str]) -> str:
        """Return the bucket's name, cached because building one takes a hash and most callers call again."""
        key = (rule.name, rule.amount, rule.per, rule.technique, *map(facts.get, rule.split))
        name = self._buckets.get(key)
        if name is None:
            if len(self._buckets) >= MOST_BUCKETS:
                self._buckets.clear()
            name = self._buckets[key] = rule.bucket(facts)
        return name

    def at_most(self, call: Call) -> int | None:
        """Return the most micro-dollars that the call may cost, or None if the price is unknown."""
        return self._micros(call, self._most(call))

    def _rules(self, settings: Settings) -> tuple[Rule, ...]:
        gateway = (settings.account, settings.gateway)
        cached = self._read.get(gateway)
        if cached is None or cached[0] is not settings:
            cached = self._read[gateway] = (settings, rules_of(settings))
        return cached[1]

    def _most(self, call: Call) -> Usage:
        """Return an upper estimate of the tokens that the call can use."""
        model = self.sizes.model(call.provider, call.model)
        context, limit = (model.context, model.max_output) if model else (None, None)
        output = (
            0 if call.dialect == "openai-embeddings" else min(call.max_output or limit or UNSAID, limit or math.inf)
        )
        total_output = min(int(output) * call.answers, MOST)
        return Usage(input=int(min(input_tokens(call), context or math.inf)), output=total_output)

    def _micros(self, call: Call, usage: Usage) -> int | None:
        return charged(call, usage, self.prices.price(call.settings, call.provider, call.model))


def rules_of(settings: Settings) -> tuple[Rule, ...]:
    rules = (*Rule.read(settings.limits), *Rule.read(settings.budgets, "micros"))
    if len({rule.name for rule in rules}) < len(rules):
        raise InvalidRequest("a limit and a budget have the same name", param="budgets", hint="rename one of them")
    return rules


def splits_by_caller(rule: Rule, pinned: Collection[str]) -> tuple[str, ...]:
    """Return the metadata names of the rule's split that callers can choose."""
    names = (each.removeprefix("metadata.") for each in rule.split if each.startswith("metadata."))
    return tuple(name for name in names if name not in pinned)


def warn_of_caller_splits(settings: Settings) -> None:
    """Log each limit that a caller can evade by sending other metadata."""
    for rule in rules_of(settings):
        if names := splits_by_caller(rule, settings.metadata):
            log.warning(
                "a caller can evade this limit with other metadata: gateway=%s limit=%s metadata=%s"
                " (hint: set this metadata on every key, whose values a request cannot change, or add a limit without"
                " the split)",
                f"{settings.account}/{settings.gateway}",
                rule.name,
                ",".join(names),
            )


def facts_of(call: Call) -> dict[str, str]:
    """Return the attributes of a call that rules split and filter by."""
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


def _known(rule: Rule, amount: int | None, call: Call) -> int:
    """Return the amount, or 0 for an unknown price. Raises Forbidden if the budget needs a price."""
    if amount is None and rule.unpriced == "refuse":
        raise Forbidden(
            f"budget {rule.name!r} needs a price, and the price of {call.provider}/{call.model} is unknown"[:300],
            hint="set a price for the model, or set unpriced = 'pass' on the budget",
        )
    return amount or 0
