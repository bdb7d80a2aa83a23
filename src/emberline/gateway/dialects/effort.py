"""How hard a model shall think: as a word, or as a number of tokens. Neither says what the other does; these are the
steps at which we call them alike."""

from __future__ import annotations

from collections.abc import Mapping

from emberline.gateway.dialects.inner import Effort

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
