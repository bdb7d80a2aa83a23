"""Claims: what a call asks of each rule that holds for it: one request, and about as much as it can use."""

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

MOST_BUCKETS = 4096  # whose names are remembered
UNSAID = 4096  # tokens of output reserved where neither the caller nor the catalogue says how many there may be


class Sizes(Protocol):
    """A catalogue, or the files of one."""

    def model(self, provider: str, name: str) -> Model | None: ...


@dataclass(slots=True)
class Claims:
    """What a call asks of each rule."""

    sizes: Sizes
    prices: Prices
    _read: dict[tuple[str, str], tuple[Settings, tuple[Rule, ...]]] = field(default_factory=dict)
    _buckets: dict[tuple[object, ...], str] = field(default_factory=dict)

    def of(self, call: Call) -> list[Claim]:
        rules = self._rules(call.settings)
        if not rules:
            return []
        facts, named, usage = facts_of(call), call.identity.limits, None
        claims = []
        for rule in rules:
            if not rule.holds(facts, named):
                continue
            amount: int | None = 1
            if rule.amount != "requests":
                usage = usage or self._most(call)
                amount = usage.total if rule.amount == "tokens" else self._micros(call, usage)
            claims.append(Claim(rule, facts["gateway"], self._bucket(rule, facts), _known(rule, amount, call)))
        return claims

    def _bucket(self, rule: Rule, facts: dict[str, str]) -> str:
        """A name takes a hash, and most calls are of somebody who called before."""
        key = (rule.name, rule.amount, rule.per, rule.technique, *map(facts.get, rule.split))
        name = self._buckets.get(key)
        if name is None:
            if len(self._buckets) >= MOST_BUCKETS:
                self._buckets.clear()
            name = self._buckets[key] = rule.bucket(facts)
        return name

    def at_most(self, call: Call) -> int | None:
        """Micro-dollars that it may cost; None: not known."""
        return self._micros(call, self._most(call))

    def _rules(self, settings: Settings) -> tuple[Rule, ...]:
        place = (settings.account, settings.gateway)
        read = self._read.get(place)
        if read is None or read[0] is not settings:
            read = self._read[place] = (settings, rules_of(settings))
        return read[1]

    def _most(self, call: Call) -> Usage:
        """About as much as it can use."""
        model = self.sizes.model(call.provider, call.model)
        context, most = (model.context, model.max_output) if model else (None, None)
        output = 0 if call.dialect == "openai-embeddings" else min(call.max_output or most or UNSAID, most or math.inf)
        whole = min(int(output) * call.answers, MOST)
        return Usage(input=int(min(input_tokens(call), context or math.inf)), output=whole)

    def _micros(self, call: Call, usage: Usage) -> int | None:
        return charged(call, usage, self.prices.price(call.settings, call.provider, call.model))


def rules_of(settings: Settings) -> tuple[Rule, ...]:
    rules = (*Rule.read(settings.limits), *Rule.read(settings.budgets, "micros"))
    if len({rule.name for rule in rules}) < len(rules):
        raise InvalidRequest("a limit and a budget have the same name", param="budgets")
    return rules


def splits_by_caller(rule: Rule, pinned: Collection[str]) -> tuple[str, ...]:
    """The metadata of a rule's split that callers can choose: all but `pinned`, which the gateway sets."""
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
    """What rules split and filter by."""
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
    if amount is None and rule.unpriced == "refuse":
        raise Forbidden(
            f"budget {rule.name!r} counts money, and what {call.provider}/{call.model} costs is not known"[:300],
            hint="give the model a price, or let the budget pass what has none (unpriced = 'pass')",
        )
    return amount or 0
