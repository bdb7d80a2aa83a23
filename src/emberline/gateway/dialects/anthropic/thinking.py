"""Claude's reasoning options: older models take a token budget, newer models an effort level."""

from __future__ import annotations

from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.change_report import ChangeReport
from emberline.gateway.dialects.effort import (
    ANTHROPIC_MIN_BUDGET_TOKENS,
    budget_for_effort,
    effort_for_budget,
    find_nearest_effort,
)
from emberline.gateway.dialects.field_reader import FieldReader
from emberline.gateway.dialects.target_model import TargetModel

CLAUDE_EFFORTS: tuple[canonical.Effort, ...] = ("low", "medium", "high", "xhigh", "max")


def parse_reasoning(fields: FieldReader, request: canonical.CanonicalRequest) -> None:
    config = fields.unread.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    parsed_effort: canonical.Effort | None = effort if effort in CLAUDE_EFFORTS else None
    thinking = fields.read("thinking", dict)
    if thinking is None:
        request.reasoning = canonical.ReasoningOptions(parsed_effort) if parsed_effort else None
        return
    request.source_fields["thinking"] = thinking
    include_reasoning = None if thinking.get("display") is None else thinking["display"] != "omitted"
    match thinking:
        case {"type": "disabled"}:
            request.reasoning = canonical.ReasoningOptions("none")
        case {"type": "enabled", "budget_tokens": int(budget)}:
            request.reasoning = canonical.ReasoningOptions(
                parsed_effort, budget, True if include_reasoning is None else include_reasoning
            )
        case _:
            request.reasoning = canonical.ReasoningOptions(
                parsed_effort, None, True if include_reasoning is None else include_reasoning
            )


def render_reasoning(
    request: canonical.CanonicalRequest, target_model: TargetModel, changes: ChangeReport
) -> canonical.Json:
    options = request.reasoning
    if options is None:
        return {}
    if options.effort == "none" or options.budget == 0:
        if target_model.claude_thinks_between_tools:
            changes.report("reasoning", "this model always thinks between tool calls")
            return {"thinking": {"type": "between_tools"}}
        if "none" in target_model.claude_efforts:
            return {"thinking": {"type": "disabled"}}
        options = canonical.ReasoningOptions("none", include_reasoning=options.include_reasoning)
    if reason := _find_thinking_conflict(request, target_model):
        changes.report("reasoning", reason)
        return {}
    display = (
        {}
        if options.include_reasoning is None
        else {"display": "summarized" if options.include_reasoning else "omitted"}
    )
    if (
        options.budget is not None
        and options.budget > 0
        and target_model.claude_supports_budget
        and options.effort is None
    ):
        return _render_thinking_budget(options.budget, request, display, changes, is_requested=True)
    if target_model.claude_supports_effort:
        return _render_adaptive_thinking(options, target_model, display, changes)
    return _render_thinking_budget(
        budget_for_effort(options.effort or "medium"), request, display, changes, is_requested=False
    )


def _render_adaptive_thinking(
    options: canonical.ReasoningOptions, target_model: TargetModel, display: canonical.Json, changes: ChangeReport
) -> canonical.Json:
    result: canonical.Json = {"thinking": {"type": "adaptive", **display}}
    effort = options.effort
    if effort is None and options.budget is not None and options.budget > 0:
        effort = effort_for_budget(options.budget)
        changes.report("reasoning", f"a budget of {options.budget} tokens was replaced by effort {effort}")
    if effort is not None:
        supported = find_nearest_effort(effort, target_model.claude_efforts)
        if supported != effort:
            changes.report("reasoning", f"effort {effort} was replaced by {supported}")
        result["output_config"] = {"effort": supported}
    return result


def _render_thinking_budget(
    budget: int,
    request: canonical.CanonicalRequest,
    display: canonical.Json,
    changes: ChangeReport,
    *,
    is_requested: bool,
) -> canonical.Json:
    assert request.max_output is not None, "max_tokens was filled in before"
    if not is_requested:
        changes.report("reasoning", f"the effort was replaced by a budget of {budget} tokens")
    if budget >= request.max_output or budget < ANTHROPIC_MIN_BUDGET_TOKENS:
        budget = max(ANTHROPIC_MIN_BUDGET_TOKENS, min(budget, request.max_output * 3 // 4))
        if budget >= request.max_output:
            changes.report("reasoning", f"max_tokens {request.max_output} leaves no room for thinking")
            return {}
        changes.report("reasoning", f"the budget was set to {budget} tokens")
    return {"thinking": {"type": "enabled", "budget_tokens": budget, **display}}


def _find_thinking_conflict(request: canonical.CanonicalRequest, target_model: TargetModel) -> str | None:
    """Return why Claude would reject thinking in this request, or None if it would accept it.

    Claude rejects thinking together with a forced tool call. Models that take a token
    budget also reject thinking if the thinking block before the last tool call is missing.
    """
    if target_model.claude_version is None:
        return None
    if request.tool_choice and request.tool_choice.mode in ("required", "named") and request.tools:
        return "thinking is not possible with a forced tool call"
    if target_model.claude_supports_effort:
        return None
    last = next((m for m in reversed(request.messages) if m.role == "assistant"), None)
    calls = last is not None and any(isinstance(part, canonical.ToolCallContent) for part in last.parts)
    if calls and last is not None and not any(isinstance(part, canonical.ReasoningContent) for part in last.parts):
        return "the thinking before the last tool call is missing"
    return None
