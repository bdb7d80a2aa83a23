"""LimitRule: allows a number of requests, tokens or micro-dollars in a time window.

A rule applies to all callers together, or separately to each value of an attribute:

    [[limits]]
    name = "each-team"
    limit = 100_000
    amount = "tokens"
    per = "minute"
    split = ["metadata.team"]                      # a separate limit for each team
    only = { model = ["gpt-5", "claude-opus-4-5"] }    # other models do not count

Requests that lack the attribute share one bucket, so a caller cannot evade a limit by leaving out the attribute.
"""

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
    name: str  # unique within a gateway
    limit: int  # in units of `amount`
    amount: LimitUnit = "requests"  # requests, tokens or micros (micro-dollars)
    per: Period = "minute"  # or a number of seconds
    technique: Technique = "fixed"  # fixed or sliding window
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
                f"limit {self.name!r}: the field limit must be from 0 to {MAX_LIMIT}, not {self.limit}", param="limit"
            )
        if isinstance(self.per, int) and not 1 <= self.per <= MAX_PERIOD_S:
            raise InvalidRequest(
                f"limit {self.name!r}: the field per must be from 1 to {MAX_PERIOD_S} seconds, not {self.per}",
                param="per",
            )
        for dimension in (*self.split, *self.only):
            if dimension not in DIMENSIONS and not dimension.startswith("metadata."):
                known = ", ".join(DIMENSIONS)
                raise InvalidRequest(
                    f"limit {self.name!r}: {dimension!r} is not an attribute that split or only can use",
                    param="split",
                    hint=f"use {known} or metadata.<name>",
                )

    @staticmethod
    def parse(
        decoded: Iterable[Mapping[str, Any]], default_unit: LimitUnit = "requests", setting: str = "limits"
    ) -> tuple[LimitRule, ...]:
        """Parse rules from decoded TOML or JSON. Raise InvalidRequest if a rule is invalid.

        `default_unit` is the unit of the rules that have no `amount`. `setting`: the setting that contains the rules.
        """
        rules = tuple(
            _parse_rule({"amount": default_unit, **rule}, f"{setting}[{i}]") for i, rule in enumerate(decoded)
        )
        if len(rules) > MAX_RULES:
            raise InvalidRequest(f"there are {len(rules)} limits; at most {MAX_RULES} are allowed", param=setting)
        names = [rule.name for rule in rules]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise InvalidRequest(
                f"two limits have the name {repeated[0]!r}; each must have a name of its own", param=setting
            )
        return rules

    def applies_to(self, attributes: Mapping[str, str], key_limits: tuple[str, ...] = ()) -> bool:
        if self.named and self.name not in key_limits:
            return False
        return not self.only or all(attributes.get(dimension, "") in values for dimension, values in self.only.items())

    def make_claim(self, attributes: Mapping[str, str], amount: int) -> Claim:
        return Claim(self, attributes.get("gateway", ""), self.bucket_name(attributes), amount)

    def bucket_name(self, attributes: Mapping[str, str]) -> str:
        """Return the name of the bucket (the counter) that requests with the same attribute values share."""
        values = msgspec.json.encode([attributes.get(dimension, "") for dimension in self.split])
        digest = hashlib.sha256(values).hexdigest()[:32] if self.split else "all"
        return f"{self.name}:{self.amount}:{self.per}:{self.technique}:{digest}"


def _parse_rule(decoded: Mapping[str, Any], param: str) -> LimitRule:
    """Return the rule. Raise InvalidRequest, with the path of the field below `param`, if the rule is invalid."""
    try:
        return msgspec.convert(decoded, LimitRule)
    except msgspec.ValidationError as e:
        message, separator, path = str(e).partition(" - at `$.")
        field = f".{path.rstrip('`')}" if separator else ""
        raise InvalidRequest(f"a limit is invalid: {message}", param=f"{param}{field}") from e
    except InvalidRequest as e:
        raise InvalidRequest(e.message, param=f"{param}.{e.param}", hint=e.hint) from e


class Claim(msgspec.Struct, frozen=True):
    """The amount that a request needs of one limit, in requests, tokens or micro-dollars."""

    rule: LimitRule
    gateway: str  # ACCOUNT/GATEWAY; part of the Redis key, so that all buckets of a call are on one shard
    bucket: str
    amount: int

    @property
    def window(self) -> LimitWindow:
        return LimitWindow.for_period(self.rule.per, self.rule.technique)
