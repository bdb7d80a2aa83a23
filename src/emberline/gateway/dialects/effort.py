"""Converts between effort levels and token budgets for reasoning, at fixed thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from emberline.gateway.dialects.canonical import Effort

EFFORTS: tuple[Effort, ...] = get_args(Effort)  # lowest first
ANTHROPIC_MIN_BUDGET_TOKENS = 1024
_BUDGET_TOKENS: Mapping[Effort, int] = {
    "none": 0,
    "minimal": 1024,
    "low": 2048,
    "medium": 8192,
    "high": 24576,
    "xhigh": 32768,
    "max": 65536,
}


def budget_for_effort(effort: Effort) -> int:
    return _BUDGET_TOKENS[effort]


def effort_for_budget(budget: int) -> Effort:
    """Return the effort level for a token budget: none, low, medium or high, which all providers know.

    A negative budget, Gemini's "dynamic", gives medium.
    """
    if budget == 0:
        return "none"
    if budget < 0:
        return "medium"
    if budget <= 4096:
        return "low"
    return "medium" if budget <= 16384 else "high"


def find_nearest_effort(effort: Effort, supported: Sequence[Effort]) -> Effort:
    """Return the supported level nearest to `effort`: the same, else the next lower, else the lowest.

    "none" is returned only if `effort` is "none".
    """
    if effort in supported:
        return effort
    thinking_efforts = [effort_name for effort_name in EFFORTS if effort_name in supported and effort_name != "none"]
    below = [effort_name for effort_name in thinking_efforts if EFFORTS.index(effort_name) < EFFORTS.index(effort)]
    return below[-1] if below else thinking_efforts[0]
