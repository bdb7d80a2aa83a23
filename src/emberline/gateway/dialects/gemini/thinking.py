"""Gemini's reasoning options: a thinking level since its third generation, a token budget before."""

from __future__ import annotations

from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.effort import budget_of, effort_of, nearest
from emberline.gateway.dialects.inner import Effort, Json, Reasoning
from emberline.gateway.dialects.recipient import Recipient

_LEVELS: tuple[Effort, ...] = ("minimal", "low", "medium", "high")
MOST_BUDGET = 24576  # accepted by all models that take a budget
LEAST_OF_PRO = 128  # Pro models always think


def parse_reasoning(config: Json | None) -> Reasoning | None:
    if config is None:
        return None
    level, budget = config.get("thinkingLevel"), config.get("thinkingBudget")
    effort = next((known for known in _LEVELS if str(level).lower() == known), None)
    show = config.get("includeThoughts")
    return Reasoning(effort, budget if isinstance(budget, int) else None, show if isinstance(show, bool) else None)


def render_reasoning(options: Reasoning, target_model: Recipient, changes: Changes) -> Json:
    effort, budget = options.effort, options.budget
    is_disabled = effort == "none" or budget == 0
    result: Json = {} if is_disabled else {"includeThoughts": options.show is not False}
    if effort is None and budget is None:
        return result
    if target_model.gemini >= 3 or not target_model.gemini:
        if effort is None:
            assert budget is not None
            level = nearest(effort_of(budget), target_model.gemini_efforts)
            changes.say("reasoning", f"a budget of {budget} tokens was replaced by level {level}")
        elif (level := nearest(effort, target_model.gemini_efforts)) != effort:
            changes.say("reasoning", f"effort {effort} was replaced by level {level}")
        return result | {"thinkingLevel": level}
    if budget is None:
        assert effort is not None
        budget = min(budget_of(effort), MOST_BUDGET)
        if effort != "none":
            changes.say("reasoning", f"effort {effort} was replaced by a budget of {budget} tokens")
    elif budget > MOST_BUDGET:
        budget = MOST_BUDGET
        changes.say("reasoning", f"the budget was reduced to {budget} tokens")
    if 0 <= budget < LEAST_OF_PRO and "-pro" in target_model.model:
        budget = LEAST_OF_PRO
        changes.say("reasoning", f"the budget was raised to this model's minimum of {budget} tokens")
    return result | {"thinkingBudget": budget}
