"""How hard Gemini shall think: a level since its third generation, a budget of tokens before."""

from __future__ import annotations

from collections.abc import Mapping

from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.effort import budget_of, effort_of
from emberline.gateway.dialects.inner import Effort, Json, Reasoning
from emberline.gateway.dialects.recipient import Recipient

_LEVELS: Mapping[Effort, str] = {
    "none": "minimal",
    "minimal": "minimal",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
_EXACT: tuple[Effort, ...] = ("minimal", "low", "medium", "high")
MOST_BUDGET = 24576  # of all models that take one


def parse_reasoning(config: Json | None) -> Reasoning | None:
    if config is None:
        return None
    level, budget = config.get("thinkingLevel"), config.get("thinkingBudget")
    effort = next((known for known in _EXACT if str(level).lower() == known), None)
    show = config.get("includeThoughts")
    return Reasoning(effort, budget if isinstance(budget, int) else None, show if isinstance(show, bool) else None)


def render_reasoning(wish: Reasoning, to: Recipient, changes: Changes) -> Json:
    effort, budget = wish.effort, wish.budget
    off = effort == "none" or budget == 0
    made: Json = {} if off else {"includeThoughts": wish.show is not False}
    if effort is None and budget is None:
        return made
    if to.gemini >= 3 or not to.gemini:
        if effort is None:
            assert budget is not None
            effort = effort_of(budget)
            changes.say("reasoning", f"a budget of {budget} tokens was asked for as level {_LEVELS[effort]}")
        elif effort not in _EXACT:
            changes.say("reasoning", f"effort {effort} was asked for as level {_LEVELS[effort]}")
        return made | {"thinkingLevel": _LEVELS[effort]}
    if budget is None:
        assert effort is not None
        budget = min(budget_of(effort), MOST_BUDGET)
        if effort != "none":
            changes.say("reasoning", f"effort {effort} was asked for as a budget of {budget} tokens")
    elif budget > MOST_BUDGET:
        budget = MOST_BUDGET
        changes.say("reasoning", f"the budget became {budget} tokens")
    return made | {"thinkingBudget": budget}
