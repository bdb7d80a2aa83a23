"""LimitRule: at most so many requests, tokens or micro-dollars in a window.

A rule applies to all callers together, or to each value of an attribute separately:

    [[limits]]
    name = "each-team"
    limit = 100_000
    amount = "tokens"
    per = "minute"
    split = ["metadata.team"]                      # a separate limit for each team
    only = { model = ["gpt-5", "claude-opus-4-5"] }    # other models do not count

Calls without a value to split by share one bucket, so a caller cannot evade a limit by omitting the value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.limits.window import LimitWindow, Period, Technique

LimitUnit = Literal["requests", "tokens", "micros"]
DIMENSIONS = ("gateway", "key", "user", "model", "provider")
MAX_LIMIT = 2**53 - 1  # the largest integer that Lua in Redis counts exactly
MAX_PERIOD_S = 366 * 86_400
MAX_RULES = 20


class LimitRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    limit: int
    amount: LimitUnit = "requests"
    per: Period = "minute"  # or a number of seconds
    technique: Technique = "fixed"
    split: tuple[str, ...] = ()  # one bucket for each combination of their values
    only: dict[str, tuple[str, ...]] = {}  # the rule applies if each attribute has one of these values
    named: bool = False  # the rule applies only to keys that name it
    unpriced: Literal["refuse", "pass"] = "refuse"  # what a budget does when the price of a model is unknown

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= 64:
            raise InvalidRequest(
                f"the name of a limit must have 1 to 64 characters, not {len(self.name)}", param="name"
            )
        if not 0 <= self.limit <= MAX_LIMIT:
            raise InvalidRequest(
                f"limit {self.name!r}: limit is {self.limit} and must be from 0 to {MAX_LIMIT}", param="limit"
            )
        if isinstance(self.per, int) and not 1 <= self.per <= MAX_PERIOD_S:
            raise InvalidRequest(
                f"limit {self.name!r}: per is {self.per} and must be from 1 to {MAX_PERIOD_S} seconds", param="per"
            )
        for dimension in (*self.split, *self.only):
            if dimension not in DIMENSIONS and not dimension.startswith("metadata."):
                known = ", ".join(DIMENSIONS)
                raise InvalidRequest(
                    f"limit {self.name!r}: split and only do not support {dimension!r}",
                    param="split",
                    hint=f"use {known} or metadata.<name>",
                )

    @staticmethod
    def parse(decoded: Iterable[Mapping[str, Any]], default_unit: LimitUnit = "requests") -> tuple[LimitRule, ...]:
        """Parse rules from decoded TOML or JSON. `default_unit` is the unit of rules that name none.

        Raises InvalidRequest.
        """
        try:
            rules = tuple(msgspec.convert({"amount": default_unit, **rule}, LimitRule) for rule in decoded)
        except msgspec.ValidationError as e:
            raise InvalidRequest(f"limits: {e}", param="limits") from e
        if len(rules) > MAX_RULES or len({rule.name for rule in rules}) < len(rules):
            raise InvalidRequest(
                f"limits: {len(rules)} rules; at most {MAX_RULES} are allowed, each with its own name", param="limits"
            )
        return rules

    def applies_to(self, facts: Mapping[str, str], key_limits: tuple[str, ...] = ()) -> bool:
        if self.named and self.name not in key_limits:
            return False
        return not self.only or all(facts.get(dimension, "") in values for dimension, values in self.only.items())

    def make_claim(self, facts: Mapping[str, str], amount: int) -> Claim:
        return Claim(self, facts.get("gateway", ""), self.bucket_name(facts), amount)

    def bucket_name(self, facts: Mapping[str, str]) -> str:
        """Return the name of the bucket that callers with the same values share."""
        values = msgspec.json.encode([facts.get(dimension, "") for dimension in self.split])
        digest = hashlib.sha256(values).hexdigest()[:32] if self.split else "all"
        return f"{self.name}:{self.amount}:{self.per}:{self.technique}:{digest}"


class Claim(msgspec.Struct, frozen=True):
    """How much of one limit a call needs: requests, tokens or cost."""

    rule: LimitRule
    gateway: str  # ACCOUNT/GATEWAY; part of the Redis key, so that all buckets of a call are on one shard
    bucket: str
    amount: int

    @property
    def window(self) -> LimitWindow:
        return LimitWindow.for_period(self.rule.per, self.rule.technique)
