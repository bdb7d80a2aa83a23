"""Gemini's reasoning options: a thinking level since Gemini 3, a token budget for earlier models."""

from __future__ import annotations

from emberline.gateway.dialects.canonical import Effort, Json, ReasoningOptions
from emberline.gateway.dialects.change_report import ChangeReport
from emberline.gateway.dialects.effort import budget_for_effort, effort_for_budget, find_nearest_effort
from emberline.gateway.dialects.target_model import TargetModel

_LEVELS: tuple[Effort, ...] = ("minimal", "low", "medium", "high")
MAX_BUDGET_TOKENS = 24576  # accepted by all models that take a budget
MIN_PRO_BUDGET_TOKENS = 128  # Pro models always think


def parse_reasoning(config: Json | None) -> ReasoningOptions | None:
    if config is None:
        return None
    level, budget = config.get("thinkingLevel"), config.get("thinkingBudget")
    effort = next((known for known in _LEVELS if str(level).lower() == known), None)
    include_reasoning = config.get("includeThoughts")
    return ReasoningOptions(
        effort,
        budget if isinstance(budget, int) else None,
        include_reasoning if isinstance(include_reasoning, bool) else None,
    )


def render_reasoning(options: ReasoningOptions, target_model: TargetModel, changes: ChangeReport) -> Json:
    effort, budget = options.effort, options.budget
    is_disabled = effort == "none" or budget == 0
    result: Json = {} if is_disabled else {"includeThoughts": options.include_reasoning is not False}
    if effort is None and budget is None:
        return result
    if target_model.gemini_generation >= 3 or not target_model.gemini_generation:
        if effort is None:
            assert budget is not None
            level = find_nearest_effort(effort_for_budget(budget), target_model.gemini_efforts)
            changes.report("reasoning", f"a budget of {budget} tokens was replaced by level {level}")
        elif (level := find_nearest_effort(effort, target_model.gemini_efforts)) != effort:
            changes.report("reasoning", f"effort {effort} was replaced by level {level}")
        return result | {"thinkingLevel": level}
    if budget is None:
        assert effort is not None
        budget = min(budget_for_effort(effort), MAX_BUDGET_TOKENS)
        if effort != "none":
            changes.report("reasoning", f"effort {effort} was replaced by a budget of {budget} tokens")
    elif budget > MAX_BUDGET_TOKENS:
        budget = MAX_BUDGET_TOKENS
        changes.report("reasoning", f"the budget was reduced to {budget} tokens")
    if 0 <= budget < MIN_PRO_BUDGET_TOKENS and "-pro" in target_model.model:
        budget = MIN_PRO_BUDGET_TOKENS
        changes.report("reasoning", f"the budget was raised to this model's minimum of {budget} tokens")
    return result | {"thinkingBudget": budget}
