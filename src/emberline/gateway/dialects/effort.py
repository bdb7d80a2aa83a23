"""How hard a model shall think: as a word, or as a number of tokens. Neither says what the other does; these are the
steps at which we call them alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from emberline.gateway.dialects.inner import Effort

EFFORTS: tuple[Effort, ...] = get_args(Effort)  # from the least
LEAST_BUDGET = 1024  # Anthropic's
_BUDGETS: Mapping[Effort, int] = {
    "none": 0,
    "minimal": 1024,
    "low": 2048,
    "medium": 8192,
    "high": 24576,
    "xhigh": 32768,
    "max": 65536,
}


def budget_of(effort: Effort) -> int:
    return _BUDGETS[effort]


def effort_of(budget: int) -> Effort:
    """The words that all know; 0 is none, and what is below (Gemini's -1) leaves it to the model."""
    if budget == 0:
        return "none"
    if budget < 0:
        return "medium"
    if budget <= 4096:
        return "low"
    return "medium" if budget <= 16384 else "high"


def nearest(effort: Effort, supported: Sequence[Effort]) -> Effort:
    """The same, or the next below that a model knows, or its least; but none only for who asked for none."""
    if effort in supported:
        return effort
    thinking_efforts = [effort_name for effort_name in EFFORTS if effort_name in supported and effort_name != "none"]
    below = [effort_name for effort_name in thinking_efforts if EFFORTS.index(effort_name) < EFFORTS.index(effort)]
    return below[-1] if below else thinking_efforts[0]
