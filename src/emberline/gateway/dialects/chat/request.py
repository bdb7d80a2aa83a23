"""Converts a chat completion request to and from the canonical form."""

from __future__ import annotations

from typing import Any

from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.adapt import merge_adjacent_messages
from emberline.gateway.dialects.change_report import OPENAI_DIALECTS, SHARED_OPENAI_FIELDS, ChangeReport
from emberline.gateway.dialects.chat.content import parse_message, render_message
from emberline.gateway.dialects.chat.field_names import FIELD_NAMES
from emberline.gateway.dialects.effort import EFFORTS, effort_for_budget, find_nearest_effort
from emberline.gateway.dialects.field_reader import FieldReader, ValueParser, make_unknown_value_error, parse_rows
from emberline.gateway.dialects.target_model import TargetModel

_MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens")


def parse(body: canonical.Json) -> canonical.CanonicalRequest:
    fields = FieldReader(body, "")
    request = canonical.CanonicalRequest("openai-chat", fields.read("model", str, ""))
    request.messages = parse_rows(fields.require("messages", list), "messages", parse_message)
    FIELD_NAMES.copy_fields_to_request(fields, request)
    for name in reversed(_MAX_TOKENS_FIELDS):
        if (limit := fields.read(name, int)) is not None:
            request.max_output = request.source_fields[name] = limit
    if (stop := fields.unread.get("stop")) is not None:
        request.stop = [fields.read("stop", str, "")] if isinstance(stop, str) else fields.read_strings("stop")
        request.source_fields["stop"] = stop
    if (wants_logprobs := fields.read("logprobs", bool)) is not None:
        request.source_fields["logprobs"] = wants_logprobs
        if wants_logprobs:
            request.logprobs = fields.read("top_logprobs", int)
            request.source_fields |= {} if request.logprobs is None else {"top_logprobs": request.logprobs}
            request.logprobs = request.logprobs or 0
    if (options := fields.read("stream_options", dict)) is not None:
        request.include_usage = bool(options.get("include_usage"))
        request.keep_source_field("stream_options", options, translated_subfields=("include_usage",))
    if (effort := find_effort(fields.unread.get("reasoning_effort"))) is not None:
        request.reasoning = canonical.ReasoningOptions(effort)
        del fields.unread["reasoning_effort"]
    parse_tools(fields, request, _parse_tool)
    if (response_format := fields.read("response_format", dict)) is not None:
        request.response_format = _parse_response_format(response_format)
        request.source_fields["response_format"] = response_format
    request.extra = fields.unread
    return request


def find_effort(value: object) -> canonical.Effort | None:
    """Return the effort if it is a known one. Others only their own provider understands."""
    return next((known for known in EFFORTS if value == known), None)


def parse_tools(
    fields: FieldReader,
    request: canonical.CanonicalRequest,
    parse_tool: ValueParser[canonical.CanonicalTool | canonical.OpaqueContent],
) -> None:
    request.tools = fields.read_list("tools", parse_tool)
    if (choice := fields.read_any("tool_choice")) is not None:
        request.tool_choice = parse_tool_choice(choice)
        request.source_fields["tool_choice"] = choice


def _parse_tool(raw: object, path: str) -> canonical.CanonicalTool | canonical.OpaqueContent:
    fields = FieldReader(raw, path)
    kind = fields.read("type", str, "function")
    if kind != "function":
        return canonical.OpaqueContent(kind, fields.whole)
    function = FieldReader(fields.require("function", dict), f"{path}.function")
    name, description = function.require("name", str), function.read("description", str)
    tool = canonical.CanonicalTool(
        name, description, function.read("parameters", dict), function.read("strict", bool), fields.unread
    )
    if function.unread:
        tool.extra["function"] = function.unread
    return tool


def parse_tool_choice(raw: object) -> canonical.CanonicalToolChoice:
    match raw:
        case "auto" | "none" | "required":
            return canonical.CanonicalToolChoice(raw)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return canonical.CanonicalToolChoice("named", [name])
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            return canonical.CanonicalToolChoice(mode, _list_tool_names(tools))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            return canonical.CanonicalToolChoice(mode, _list_tool_names(tools))
    raise make_unknown_value_error(raw, "tool_choice", "auto, none, required, a function, allowed_tools")


def _list_tool_names(tools: list[Any]) -> list[str]:
    rows = [FieldReader(tool, "tool_choice.tools") for tool in tools]
    return [
        FieldReader(row.read("function", dict, row.unread), "tool_choice.tools").require("name", str) for row in rows
    ]


def _parse_response_format(raw: canonical.Json) -> canonical.ResponseFormat:
    match raw:
        case {"type": "text"}:
            return canonical.ResponseFormat("text")
        case {"type": "json_object"}:
            return canonical.ResponseFormat("json")
        case {"type": "json_schema", "json_schema": dict(response_format)}:
            fields = FieldReader(response_format, "response_format.json_schema")
            schema, name = fields.read("schema", dict), fields.read("name", str, "")
            return canonical.ResponseFormat(
                "schema", schema, name, fields.read("strict", bool), fields.read("description", str)
            )
    raise make_unknown_value_error(raw.get("type"), "response_format.type", "text, json_object, json_schema")


def render(request: canonical.CanonicalRequest, target_model: TargetModel, changes: ChangeReport) -> canonical.Json:
    is_same_format = request.dialect == "openai-chat"
    messages = (
        request.messages
        if is_same_format
        else _move_media_out_of_results(merge_adjacent_messages(request.messages, roles=("assistant",)), changes)
    )
    rows = [row for message in messages for row in render_message(message)]
    if request.system:
        rows = [*render_message(canonical.CanonicalMessage("system", request.system, "auto")), *rows]
    body: canonical.Json = {"model": target_model.model or request.model, "messages": rows}
    if not is_same_format:
        changes.report_unsupported(request.top_k, "top_k", "openai-chat")
        request.top_k = None
        if not request.tools:
            request.parallel_tools = None  # OpenAI rejects the field if there are no tools
    body |= FIELD_NAMES.render_copied_fields(request)
    if request.tools:
        body["tools"] = [_render_tool(tool) for tool in request.tools]
    if is_same_format:
        body |= {} if request.reasoning is None else {"reasoning_effort": request.reasoning.effort}
        return {**body, **request.source_fields, **request.extra}
    if request.max_output is not None:
        body[target_model.max_tokens_field] = request.max_output
    if request.stop:
        body["stop"] = request.stop
    if request.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.logprobs}
    if request.stream:
        body["stream_options"] = {"include_usage": True}  # not passed on to a client that did not request it
    if request.tool_choice and request.tools:
        body["tool_choice"] = _render_tool_choice(request.tool_choice)
    if request.response_format:
        body["response_format"] = _render_response_format(request.response_format)
    if request.reasoning:
        body |= _render_effort(request.reasoning, target_model, changes)
    if request.dialect in OPENAI_DIALECTS:
        body |= {name: value for name, value in request.extra.items() if name in SHARED_OPENAI_FIELDS}
    return body


def _move_media_out_of_results(
    messages: list[canonical.CanonicalMessage], changes: ChangeReport
) -> list[canonical.CanonicalMessage]:
    """Move images and files from tool results into a user message: tool results may hold only text."""
    for message in messages:
        media: list[canonical.Part] = []
        for part in message.parts:
            if isinstance(part, canonical.ToolResultContent) and not all(
                isinstance(inner, canonical.TextContent) for inner in part.parts
            ):
                media += [inner for inner in part.parts if not isinstance(inner, canonical.TextContent)]
                part.parts = [inner for inner in part.parts if isinstance(inner, canonical.TextContent)]
                changes.report("messages", "media in tool results was moved to a user message", subfield=".tool_result")
        message.parts += media
    return messages


def _render_effort(
    reasoning: canonical.ReasoningOptions, target_model: TargetModel, changes: ChangeReport
) -> canonical.Json:
    effort = choose_effort(reasoning, target_model, changes)
    if reasoning.effort is None and reasoning.budget is None:
        changes.report("reasoning", "chat has only an effort level")
    return {} if effort is None else {"reasoning_effort": effort}


def choose_effort(
    reasoning: canonical.ReasoningOptions, target_model: TargetModel, changes: ChangeReport
) -> canonical.Effort | None:
    effort, supported = reasoning.effort, target_model.gpt_efforts
    if supported == ():
        changes.report("reasoning", "this model has no reasoning")
        return None
    if effort is None and reasoning.budget is not None:
        effort = effort_for_budget(reasoning.budget)
        changes.report("reasoning", f"a budget of {reasoning.budget} tokens was replaced by effort {effort}")
    if effort is None or supported is None or effort in supported:
        return effort
    changes.report("reasoning", f"effort {effort} was replaced by {find_nearest_effort(effort, supported)}")
    return find_nearest_effort(effort, supported)


def _render_tool(tool: canonical.CanonicalTool | canonical.OpaqueContent) -> canonical.Json:
    if isinstance(tool, canonical.OpaqueContent):
        return tool.raw
    function: canonical.Json = {"name": tool.name}
    fields = (("description", tool.description), ("parameters", tool.schema), ("strict", tool.strict))
    function |= {name: value for name, value in fields if value is not None}
    return {"type": "function", **tool.extra, "function": {**function, **tool.extra.get("function", {})}}


def _render_tool_choice(choice: canonical.CanonicalToolChoice) -> str | canonical.Json:
    if choice.mode == "named":
        return {"type": "function", "function": {"name": choice.names[0]}}
    if choice.names:
        tools = [{"type": "function", "function": {"name": name}} for name in choice.names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice.mode


def _render_response_format(response_format: canonical.ResponseFormat) -> canonical.Json:
    if response_format.kind != "schema":
        return {"type": "text" if response_format.kind == "text" else "json_object"}
    schema: canonical.Json = {"name": response_format.name or "reply", "schema": response_format.schema}
    schema |= {} if response_format.strict is None else {"strict": response_format.strict}
    schema |= {} if response_format.description is None else {"description": response_format.description}
    return {"type": "json_schema", "json_schema": schema}
