"""How hard Claude shall think: a budget of tokens in earlier models, an effort in later ones, both in between."""

from __future__ import annotations

from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.effort import LEAST_BUDGET, budget_of, effort_of, nearest
from emberline.gateway.dialects.fields import Fields
from emberline.gateway.dialects.inner import Conversation, Effort, Json, Reasoning, Thinking, ToolCall
from emberline.gateway.dialects.recipient import Recipient

EFFORTS: tuple[Effort, ...] = ("low", "medium", "high", "xhigh", "max")


def parse_reasoning(said: Fields, asked: Conversation) -> None:
    config = said.left.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    known: Effort | None = effort if effort in EFFORTS else None
    thinking = said.take("thinking", dict)
    if thinking is None:
        asked.reasoning = Reasoning(known) if known else None
        return
    asked.kept["thinking"] = thinking
    show = None if thinking.get("display") is None else thinking["display"] != "omitted"
    match thinking:
        case {"type": "disabled"}:
            asked.reasoning = Reasoning("none")
        case {"type": "enabled", "budget_tokens": int(budget)}:
            asked.reasoning = Reasoning(known, budget, True if show is None else show)
        case _:
            asked.reasoning = Reasoning(known, None, True if show is None else show)


def render_reasoning(asked: Conversation, to: Recipient, changes: Changes) -> Json:
    wish = asked.reasoning
    if wish is None:
        return {}
    if wish.effort == "none" or wish.budget == 0:
        if to.claude_thinks_between:
            changes.say("reasoning", "this model thinks at least between calls of tools")
            return {"thinking": {"type": "between_tools"}}
        if "none" in to.claude_efforts:
            return {"thinking": {"type": "disabled"}}
        wish = Reasoning("none", show=wish.show)
    if why := _cannot_think(asked, to):
        changes.say("reasoning", why)
        return {}
    shown = {} if wish.show is None else {"display": "summarized" if wish.show else "omitted"}
    if wish.budget is not None and wish.budget > 0 and to.claude_has_budget and wish.effort is None:
        return _budgeted(wish.budget, asked, shown, changes, asked_for=True)
    if to.claude_has_effort:
        return _adaptive(wish, to, shown, changes)
    return _budgeted(budget_of(wish.effort or "medium"), asked, shown, changes, asked_for=False)


def _adaptive(wish: Reasoning, to: Recipient, shown: Json, changes: Changes) -> Json:
    made: Json = {"thinking": {"type": "adaptive", **shown}}
    effort = wish.effort
    if effort is None and wish.budget is not None and wish.budget > 0:
        effort = effort_of(wish.budget)
        changes.say("reasoning", f"a budget of {wish.budget} tokens was asked for as effort {effort}")
    if effort is not None:
        known = nearest(effort, to.claude_efforts)
        if known != effort:
            changes.say("reasoning", f"effort {effort} was asked for as {known}")
        made["output_config"] = {"effort": known}
    return made


def _budgeted(budget: int, asked: Conversation, shown: Json, changes: Changes, *, asked_for: bool) -> Json:
    assert asked.max_output is not None, "max_tokens was filled in before"
    if not asked_for:
        changes.say("reasoning", f"the effort was asked for as a budget of {budget} tokens")
    if budget >= asked.max_output or budget < LEAST_BUDGET:
        budget = max(LEAST_BUDGET, min(budget, asked.max_output * 3 // 4))
        if budget >= asked.max_output:
            changes.say("reasoning", f"there is no room to think in {asked.max_output} tokens")
            return {}
        changes.say("reasoning", f"the budget became {budget} tokens")
    return {"thinking": {"type": "enabled", "budget_tokens": budget, **shown}}


def _cannot_think(asked: Conversation, to: Recipient) -> str | None:
    """Claude refuses to think where a call is forced; and, with a budget, after calls whose thinking is not shown."""
    if to.claude is None:
        return None
    if asked.tool_choice and asked.tool_choice.mode in ("required", "named") and asked.tools:
        return "a forced call excludes thinking"
    if to.claude_has_effort:
        return None
    last = next((m for m in reversed(asked.messages) if m.role == "assistant"), None)
    calls = last is not None and any(isinstance(part, ToolCall) for part in last.parts)
    if calls and last is not None and not any(isinstance(part, Thinking) for part in last.parts):
        return "the thinking before the last call is not there"
    return None
