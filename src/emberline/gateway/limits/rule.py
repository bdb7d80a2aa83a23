"""Rule: at most so many requests, tokens or micro-dollars in a window, for everybody together or for each one apart.

    [[limits]]
    name = "each-team"
    limit = 100_000
    amount = "tokens"
    per = "minute"
    split = ["metadata.team"]                      # every team has its own
    only = { model = ["gpt-5", "claude-opus-4-5"] }    # the rest does not count

Whoever does not say what a rule splits by shares one bucket with all who do not: leaving it out is no way round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.limits.window import Period, Technique, Window

Amount = Literal["requests", "tokens", "micros"]
DIMENSIONS = ("gateway", "key", "user", "model", "provider")
MOST = 2**53 - 1  # what Redis' Lua counts exactly
LONGEST = 366 * 86_400
MOST_RULES = 20


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    limit: int
    amount: Amount = "requests"
    per: Period = "minute"  # or seconds
    technique: Technique = "fixed"
    split: tuple[str, ...] = ()  # a bucket for each value of these
    only: dict[str, tuple[str, ...]] = {}  # holds only where each of these has one of its values
    named: bool = False  # holds only for keys that name it
    unpriced: Literal["refuse", "pass"] = "refuse"  # money, when the price of a model is not known

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= 64:
            raise InvalidRequest("a limit's name must have 1 to 64 characters", param="name")
        if not 0 <= self.limit <= MOST:
            raise InvalidRequest(f"limit {self.name!r}: limit must be from 0 to {MOST}", param="limit")
        if isinstance(self.per, int) and not 1 <= self.per <= LONGEST:
            raise InvalidRequest(f"limit {self.name!r}: per must be from 1 to {LONGEST} seconds", param="per")
        for dimension in (*self.split, *self.only):
            if dimension not in DIMENSIONS and not dimension.startswith("metadata."):
                known = ", ".join(DIMENSIONS)
                raise InvalidRequest(
                    f"limit {self.name!r}: {dimension!r} is nothing to split or filter by",
                    param="split",
                    hint=f"it may be {known} or metadata.<name>",
                )

    @staticmethod
    def read(found: Iterable[Mapping[str, Any]], amount: Amount = "requests") -> tuple[Rule, ...]:
        """From decoded TOML or JSON. `amount` is what a rule that does not say counts."""
        try:
            rules = tuple(msgspec.convert({"amount": amount, **rule}, Rule) for rule in found)
        except msgspec.ValidationError as e:
            raise InvalidRequest(f"limits: {e}", param="limits") from e
        if len(rules) > MOST_RULES or len({rule.name for rule in rules}) < len(rules):
            raise InvalidRequest(f"limits: at most {MOST_RULES}, each with its own name", param="limits")
        return rules

    def holds(self, facts: Mapping[str, str], named: tuple[str, ...] = ()) -> bool:
        if self.named and self.name not in named:
            return False
        return not self.only or all(facts.get(dimension, "") in values for dimension, values in self.only.items())

    def claim(self, facts: Mapping[str, str], amount: int) -> Claim:
        return Claim(self, facts.get("gateway", ""), self.bucket(facts), amount)

    def bucket(self, facts: Mapping[str, str]) -> str:
        """The name of what this caller shares with those of the same values."""
        values = msgspec.json.encode([facts.get(dimension, "") for dimension in self.split])
        digest = hashlib.sha256(values).hexdigest()[:32] if self.split else "all"
        return f"{self.name}:{self.amount}:{self.per}:{self.technique}:{digest}"


class Claim(msgspec.Struct, frozen=True):
    """What one call asks of one rule."""

    rule: Rule
    gateway: str  # whose: buckets of one call are all of one gateway, so that one Redis shard has them
    bucket: str
    amount: int

    @property
    def window(self) -> Window:
        return Window.of(self.rule.per, self.rule.technique)
