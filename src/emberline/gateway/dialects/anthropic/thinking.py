"""Claude's reasoning options: a token budget in earlier models, an effort level in later ones."""

from __future__ import annotations

from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.effort import LEAST_BUDGET, budget_of, effort_of, nearest
from emberline.gateway.dialects.fields import Fields
from emberline.gateway.dialects.inner import Conversation, Effort, Json, Reasoning, Thinking, ToolCall
from emberline.gateway.dialects.recipient import Recipient

EFFORTS: tuple[Effort, ...] = ("low", "medium", "high", "xhigh", "max")


def parse_reasoning(fields: Fields, request: Conversation) -> None:
    config = fields.left.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    known: Effort | None = effort if effort in EFFORTS else None
    thinking = fields.take("thinking", dict)
    if thinking is None:
        request.reasoning = Reasoning(known) if known else None
        return
    request.kept["thinking"] = thinking
    show = None if thinking.get("display") is None else thinking["display"] != "omitted"
    match thinking:
        case {"type": "disabled"}:
            request.reasoning = Reasoning("none")
        case {"type": "enabled", "budget_tokens": int(budget)}:
            request.reasoning = Reasoning(known, budget, True if show is None else show)
        case _:
            request.reasoning = Reasoning(known, None, True if show is None else show)


def render_reasoning(request: Conversation, target_model: Recipient, changes: Changes) -> Json:
    options = request.reasoning
    if options is None:
        return {}
    if options.effort == "none" or options.budget == 0:
        if target_model.claude_thinks_between:
            changes.say("reasoning", "this model always thinks between tool calls")
            return {"thinking": {"type": "between_tools"}}
        if "none" in target_model.claude_efforts:
            return {"thinking": {"type": "disabled"}}
        options = Reasoning("none", show=options.show)
    if why := _cannot_think(request, target_model):
        changes.say("reasoning", why)
        return {}
    shown = {} if options.show is None else {"display": "summarized" if options.show else "omitted"}
    if options.budget is not None and options.budget > 0 and target_model.claude_has_budget and options.effort is None:
        return _budgeted(options.budget, request, shown, changes, asked_for=True)
    if target_model.claude_has_effort:
        return _adaptive(options, target_model, shown, changes)
    return _budgeted(budget_of(options.effort or "medium"), request, shown, changes, asked_for=False)


def _adaptive(options: Reasoning, target_model: Recipient, shown: Json, changes: Changes) -> Json:
    result: Json = {"thinking": {"type": "adaptive", **shown}}
    effort = options.effort
    if effort is None and options.budget is not None and options.budget > 0:
        effort = effort_of(options.budget)
        changes.say("reasoning", f"a budget of {options.budget} tokens was replaced by effort {effort}")
    if effort is not None:
        known = nearest(effort, target_model.claude_efforts)
        if known != effort:
            changes.say("reasoning", f"effort {effort} was replaced by {known}")
        result["output_config"] = {"effort": known}
    return result


def _budgeted(budget: int, request: Conversation, shown: Json, changes: Changes, *, asked_for: bool) -> Json:
    assert request.max_output is not None, "max_tokens was filled in before"
    if not asked_for:
        changes.say("reasoning", f"the effort was replaced by a budget of {budget} tokens")
    if budget >= request.max_output or budget < LEAST_BUDGET:
        budget = max(LEAST_BUDGET, min(budget, request.max_output * 3 // 4))
        if budget >= request.max_output:
            changes.say("reasoning", f"max_tokens {request.max_output} leaves no room for thinking")
            return {}
        changes.say("reasoning", f"the budget was set to {budget} tokens")
    return {"thinking": {"type": "enabled", "budget_tokens": budget, **shown}}


def _cannot_think(request: Conversation, target_model: Recipient) -> str | None:
    """Return why Claude would reject thinking here, None if it would not.

    It rejects thinking with a forced tool call and, with a budget, after tool calls without their thinking blocks.
    """
    if target_model.claude is None:
        return None
    if request.tool_choice and request.tool_choice.mode in ("required", "named") and request.tools:
        return "thinking is not possible with a forced tool call"
    if target_model.claude_has_effort:
        return None
    last = next((m for m in reversed(request.messages) if m.role == "assistant"), None)
    calls = last is not None and any(isinstance(part, ToolCall) for part in last.parts)
    if calls and last is not None and not any(isinstance(part, Thinking) for part in last.parts):
        return "the thinking before the last tool call is missing"
    return None
