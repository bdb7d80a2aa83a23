"""Converts a chat completion request to and from the canonical form."""

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
    fields = Fields(body, "")
    request = Conversation("openai-chat", fields.take("model", str, ""))
    request.messages = each(fields.need("messages", list), "messages", parse_message)
    WORDS.take(fields, request)
    for name in reversed(_LIMITS):
        if (limit := fields.take(name, int)) is not None:
            request.max_output = request.kept[name] = limit
    if (stop := fields.left.get("stop")) is not None:
        request.stop = [fields.take("stop", str, "")] if isinstance(stop, str) else fields.texts("stop")
        request.kept["stop"] = stop
    if (shown := fields.take("logprobs", bool)) is not None:
        request.kept["logprobs"] = shown
        if shown:
            request.logprobs = fields.take("top_logprobs", int)
            request.kept |= {} if request.logprobs is None else {"top_logprobs": request.logprobs}
            request.logprobs = request.logprobs or 0
    if (options := fields.take("stream_options", dict)) is not None:
        request.include_usage = bool(options.get("include_usage"))
        request.keep("stream_options", options, read=("include_usage",))
    if (effort := fields.take("reasoning_effort", str)) is not None:
        request.reasoning = Reasoning(parse_effort(effort, "reasoning_effort"))
    parse_tools(fields, request, _parse_tool)
    if (response_format := fields.take("response_format", dict)) is not None:
        request.response_format = _parse_format(response_format)
        request.kept["response_format"] = response_format
    request.extra = fields.left
    return request


def parse_effort(effort: str, path: str) -> Effort:
    for known in EFFORTS:
        if effort == known:
            return known
    raise unknown(effort, path, ", ".join(EFFORTS))


def parse_tools(fields: Fields, request: Conversation, parse_tool: Parse[Tool | Opaque]) -> None:
    request.tools = fields.each("tools", parse_tool)
    if (choice := fields.raw("tool_choice")) is not None:
        request.tool_choice = parse_choice(choice)
        request.kept["tool_choice"] = choice


def _parse_tool(raw: object, path: str) -> Tool | Opaque:
    fields = Fields(raw, path)
    kind = fields.take("type", str, "function")
    if kind != "function":
        return Opaque(kind, fields.whole)
    function = Fields(fields.need("function", dict), f"{path}.function")
    name, description = function.need("name", str), function.take("description", str)
    tool = Tool(name, description, function.take("parameters", dict), function.take("strict", bool), fields.left)
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
        case {"type": "json_schema", "json_schema": dict(response_format)}:
            fields = Fields(response_format, "response_format.json_schema")
            schema, name = fields.take("schema", dict), fields.take("name", str, "")
            return ResponseFormat("schema", schema, name, fields.take("strict", bool), fields.take("description", str))
    raise unknown(raw.get("type"), "response_format.type", "text, json_object, json_schema")


def render(request: Conversation, target_model: Recipient, changes: Changes) -> Json:
    own = request.dialect == "openai-chat"
    messages = request.messages if own else _fit_results(merged(request.messages, roles=("assistant",)), changes)
    rows = [row for message in messages for row in render_message(message)]
    if request.system:
        rows = [*render_message(Message("system", request.system, "auto")), *rows]
    body: Json = {"model": target_model.model or request.model, "messages": rows}
    if not own:
        changes.dropped(request.top_k, "top_k", "openai-chat")
        request.top_k = None
        if not request.tools:
            request.parallel_tools = None  # OpenAI rejects the field if there are no tools
    body |= WORDS.said(request)
    if request.tools:
        body["tools"] = [_render_tool(tool) for tool in request.tools]
    if own:
        body |= {} if request.reasoning is None else {"reasoning_effort": request.reasoning.effort}
        return {**body, **request.kept, **request.extra}
    if request.max_output is not None:
        body[target_model.max_tokens_name] = request.max_output
    if request.stop:
        body["stop"] = request.stop
    if request.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.logprobs}
    if request.stream:
        body["stream_options"] = {"include_usage": True}  # not passed on to a client that did not request it
    if request.tool_choice and request.tools:
        body["tool_choice"] = _render_choice(request.tool_choice)
    if request.response_format:
        body["response_format"] = _render_format(request.response_format)
    if request.reasoning:
        body |= _render_effort(request.reasoning, target_model, changes)
    if request.dialect in OPENAI:
        body |= {name: value for name, value in request.extra.items() if name in OPENAI_SHARED}
    return body


def _fit_results(messages: list[Message], changes: Changes) -> list[Message]:
    """Move images and files out of tool results into the user's message: chat allows only text there."""
    for message in messages:
        shown: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolResult) and not all(isinstance(inner, Text) for inner in part.parts):
                shown += [inner for inner in part.parts if not isinstance(inner, Text)]
                part.parts = [inner for inner in part.parts if isinstance(inner, Text)]
                changes.say("messages", "media in tool results was moved to a user message", within=".tool_result")
        message.parts += shown
    return messages


def _render_effort(reasoning: Reasoning, target_model: Recipient, changes: Changes) -> Json:
    effort = rendered_effort(reasoning, target_model, changes)
    if reasoning.effort is None and reasoning.budget is None:
        changes.say("reasoning", "chat has only an effort level")
    return {} if effort is None else {"reasoning_effort": effort}


def rendered_effort(reasoning: Reasoning, target_model: Recipient, changes: Changes) -> Effort | None:
    effort, known = reasoning.effort, target_model.gpt_efforts
    if known == ():
        changes.say("reasoning", "this model has no reasoning")
        return None
    if effort is None and reasoning.budget is not None:
        effort = effort_of(reasoning.budget)
        changes.say("reasoning", f"a budget of {reasoning.budget} tokens was replaced by effort {effort}")
    if effort is None or known is None or effort in known:
        return effort
    changes.say("reasoning", f"effort {effort} was replaced by {nearest(effort, known)}")
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


def _render_format(response_format: ResponseFormat) -> Json:
    if response_format.kind != "schema":
        return {"type": "text" if response_format.kind == "text" else "json_object"}
    schema: Json = {"name": response_format.name or "reply", "schema": response_format.schema}
    schema |= {} if response_format.strict is None else {"strict": response_format.strict}
    schema |= {} if response_format.description is None else {"description": response_format.description}
    return {"type": "json_schema", "json_schema": schema}
