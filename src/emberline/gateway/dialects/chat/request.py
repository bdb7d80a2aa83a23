"""A chat completion's request, and the inner form's Conversation."""

from __future__ import annotations

from typing import Any

from emberline.gateway.dialects.adapt import merged
from emberline.gateway.dialects.changes import OPENAI, OPENAI_SHARED, Changes
from emberline.gateway.dialects.chat.content import parse_message, render_message
from emberline.gateway.dialects.chat.words import WORDS
from emberline.gateway.dialects.effort import EFFORTS, effort_of, nearest
from emberline.gateway.dialects.fields import Fields, Parse, each, unknown
from emberline.gateway.dialects.inner import (
    Conversation,
    Effort,
    Json,
    Message,
    Opaque,
    Part,
    Reasoning,
    ResponseFormat,
    Text,
    Tool,
    ToolChoice,
    ToolResult,
)
from emberline.gateway.dialects.recipient import Recipient

_LIMITS = ("max_completion_tokens", "max_tokens")


def parse(body: Json) -> Conversation:
    said = Fields(body, "")
    asked = Conversation("openai-chat", said.take("model", str, ""))
    asked.messages = each(said.need("messages", list), "messages", parse_message)
    WORDS.take(said, asked)
    for name in reversed(_LIMITS):
        if (limit := said.take(name, int)) is not None:
            asked.max_output = asked.kept[name] = limit
    if (stop := said.left.get("stop")) is not None:
        asked.stop = [said.take("stop", str, "")] if isinstance(stop, str) else said.texts("stop")
        asked.kept["stop"] = stop
    if (shown := said.take("logprobs", bool)) is not None:
        asked.kept["logprobs"] = shown
        if shown:
            asked.logprobs = said.take("top_logprobs", int)
            asked.kept |= {} if asked.logprobs is None else {"top_logprobs": asked.logprobs}
            asked.logprobs = asked.logprobs or 0
    if (options := said.take("stream_options", dict)) is not None:
        asked.include_usage = bool(options.get("include_usage"))
        asked.keep("stream_options", options, read=("include_usage",))
    if (effort := said.take("reasoning_effort", str)) is not None:
        asked.reasoning = Reasoning(parse_effort(effort, "reasoning_effort"))
    parse_tools(said, asked, _parse_tool)
    if (form := said.take("response_format", dict)) is not None:
        asked.response_format = _parse_format(form)
        asked.kept["response_format"] = form
    asked.extra = said.left
    return asked


def parse_effort(effort: str, path: str) -> Effort:
    for known in EFFORTS:
        if effort == known:
            return known
    raise unknown(effort, path, ", ".join(EFFORTS))


def parse_tools(said: Fields, asked: Conversation, parse_tool: Parse[Tool | Opaque]) -> None:
    asked.tools = said.each("tools", parse_tool)
    if (choice := said.raw("tool_choice")) is not None:
        asked.tool_choice = parse_choice(choice)
        asked.kept["tool_choice"] = choice


def _parse_tool(raw: object, path: str) -> Tool | Opaque:
    said = Fields(raw, path)
    kind = said.take("type", str, "function")
    if kind != "function":
        return Opaque(kind, said.whole)
    function = Fields(said.need("function", dict), f"{path}.function")
    name, about = function.need("name", str), function.take("description", str)
    tool = Tool(name, about, function.take("parameters", dict), function.take("strict", bool), said.left)
    if function.left:
        tool.extra["function"] = function.left
    return tool


def parse_choice(raw: object) -> ToolChoice:
    match raw:
        case "auto" | "none" | "required":
            return ToolChoice(raw)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice("named", [name])
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            return ToolChoice(mode, _names(tools))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            return ToolChoice(mode, _names(tools))
    raise unknown(raw, "tool_choice", "auto, none, required, a function, allowed_tools")


def _names(tools: list[Any]) -> list[str]:
    rows = [Fields(tool, "tool_choice.tools") for tool in tools]
    return [Fields(row.take("function", dict, row.left), "tool_choice.tools").need("name", str) for row in rows]


def _parse_format(raw: Json) -> ResponseFormat:
    match raw:
        case {"type": "text"}:
            return ResponseFormat("text")
        case {"type": "json_object"}:
            return ResponseFormat("json")
        case {"type": "json_schema", "json_schema": dict(form)}:
            said = Fields(form, "response_format.json_schema")
            schema, name = said.take("schema", dict), said.take("name", str, "")
            return ResponseFormat("schema", schema, name, said.take("strict", bool), said.take("description", str))
    raise unknown(raw.get("type"), "response_format.type", "text, json_object, json_schema")


def render(asked: Conversation, to: Recipient, changes: Changes) -> Json:
    own = asked.dialect == "openai-chat"
    messages = asked.messages if own else _fit_results(merged(asked.messages, roles=("assistant",)), changes)
    rows = [row for message in messages for row in render_message(message)]
    if asked.system:
        rows = [*render_message(Message("system", asked.system, "auto")), *rows]
    body: Json = {"model": to.model or asked.model, "messages": rows}
    if not own:
        changes.dropped(asked.top_k, "top_k", "openai-chat")
        asked.top_k = None
        if not asked.tools:
            asked.parallel_tools = None  # which is refused where there are none to call
    body |= WORDS.said(asked)
    if asked.tools:
        body["tools"] = [_render_tool(tool) for tool in asked.tools]
    if own:
        body |= {} if asked.reasoning is None else {"reasoning_effort": asked.reasoning.effort}
        return {**body, **asked.kept, **asked.extra}
    if asked.max_output is not None:
        body[to.max_tokens_name] = asked.max_output
    if asked.stop:
        body["stop"] = asked.stop
    if asked.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": asked.logprobs}
    if asked.stream:
        body["stream_options"] = {"include_usage": True}  # what is not asked for is not passed on
    if asked.tool_choice and asked.tools:
        body["tool_choice"] = _render_choice(asked.tool_choice)
    if asked.response_format:
        body["response_format"] = _render_format(asked.response_format)
    if asked.reasoning:
        body |= _render_effort(asked.reasoning, to, changes)
    if asked.dialect in OPENAI:
        body |= {name: value for name, value in asked.extra.items() if name in OPENAI_SHARED}
    return body


def _fit_results(messages: list[Message], changes: Changes) -> list[Message]:
    """Results of tools are text in chat: what else is in them, the user says after them."""
    for message in messages:
        shown: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolResult) and not all(isinstance(inner, Text) for inner in part.parts):
                shown += [inner for inner in part.parts if not isinstance(inner, Text)]
                part.parts = [inner for inner in part.parts if isinstance(inner, Text)]
                changes.say("messages", "pictures in results of tools are said by the user", within=".tool_result")
        message.parts += shown
    return messages


def _render_effort(reasoning: Reasoning, to: Recipient, changes: Changes) -> Json:
    effort = rendered_effort(reasoning, to, changes)
    if reasoning.effort is None and reasoning.budget is None:
        changes.say("reasoning", "chat knows only an effort")
    return {} if effort is None else {"reasoning_effort": effort}


def rendered_effort(reasoning: Reasoning, to: Recipient, changes: Changes) -> Effort | None:
    effort, known = reasoning.effort, to.gpt_efforts
    if known == ():
        changes.say("reasoning", "this model does not think")
        return None
    if effort is None and reasoning.budget is not None:
        effort = effort_of(reasoning.budget)
        changes.say("reasoning", f"a budget of {reasoning.budget} tokens was asked for as effort {effort}")
    if effort is None or known is None or effort in known:
        return effort
    changes.say("reasoning", f"effort {effort} was asked for as {nearest(effort, known)}")
    return nearest(effort, known)


def _render_tool(tool: Tool | Opaque) -> Json:
    if isinstance(tool, Opaque):
        return tool.raw
    function: Json = {"name": tool.name}
    fields = (("description", tool.description), ("parameters", tool.schema), ("strict", tool.strict))
    function |= {name: value for name, value in fields if value is not None}
    return {"type": "function", **tool.extra, "function": {**function, **tool.extra.get("function", {})}}


def _render_choice(choice: ToolChoice) -> str | Json:
    if choice.mode == "named":
        return {"type": "function", "function": {"name": choice.names[0]}}
    if choice.names:
        tools = [{"type": "function", "function": {"name": name}} for name in choice.names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice.mode


def _render_format(form: ResponseFormat) -> Json:
    if form.kind != "schema":
        return {"type": "text" if form.kind == "text" else "json_object"}
    schema: Json = {"name": form.name or "reply", "schema": form.schema}
    schema |= {} if form.strict is None else {"strict": form.strict}
    schema |= {} if form.description is None else {"description": form.description}
    return {"type": "json_schema", "json_schema": schema}
