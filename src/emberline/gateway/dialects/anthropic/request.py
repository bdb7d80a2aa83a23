"""Converts an Anthropic Messages request to and from the canonical form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.adapt import merge_adjacent_messages
from emberline.gateway.dialects.anthropic.content import (
    parse_blocks,
    parse_message,
    parse_object,
    render_content,
)
from emberline.gateway.dialects.anthropic.field_names import FIELD_NAMES
from emberline.gateway.dialects.anthropic.thinking import CLAUDE_EFFORTS, parse_reasoning, render_reasoning
from emberline.gateway.dialects.change_report import ChangeReport
from emberline.gateway.dialects.field_reader import FieldReader, make_unknown_value_error, parse_rows
from emberline.gateway.dialects.schemas import ANTHROPIC_KEYWORDS, forbid_additional_properties, restrict_keywords
from emberline.gateway.dialects.target_model import TargetModel
from emberline.wire.anthropic import make_safe_tool_id

DEFAULT_MAX_TOKENS = 4096
_EMPTY_SCHEMA: canonical.Json = {"type": "object", "properties": {}}


def parse(body: canonical.Json) -> canonical.CanonicalRequest:
    fields = FieldReader(body, "")
    request = canonical.CanonicalRequest("anthropic", fields.read("model", str, ""))
    request.messages = parse_rows(fields.require("messages", list), "messages", parse_message)
    if (system := fields.read_any("system")) is not None:
        request.system, _ = parse_blocks(system, "system")
        request.source_fields["system"] = system
    FIELD_NAMES.copy_fields_to_request(fields, request)
    parse_reasoning(fields, request)
    if (config := fields.read("output_config", dict)) is not None:
        understood = ("format", "effort") if config.get("effort") in CLAUDE_EFFORTS else ("format",)
        request.keep_source_field("output_config", config, translated_subfields=understood)
        request.response_format = _parse_response_format(config.get("format"), "output_config.format")
    if (response_format := fields.read("output_format", dict)) is not None:  # older name of output_config.format
        request.source_fields["output_format"] = response_format
        request.response_format = request.response_format or _parse_response_format(response_format, "output_format")
    _parse_tools(fields, request)
    if (metadata := fields.read("metadata", dict)) is not None:
        request.keep_source_field("metadata", metadata, translated_subfields=("user_id",))
        user = metadata.get("user_id")
        request.user = user if isinstance(user, str) else None
    request.extra = fields.unread
    return request


def _parse_response_format(raw: object, path: str) -> canonical.ResponseFormat | None:
    match raw:
        case {"type": "json_schema", "schema": dict(schema)}:
            return canonical.ResponseFormat("schema", schema)
        case None:
            return None
    raise make_unknown_value_error(raw, path, "json_schema")


def _parse_tools(fields: FieldReader, request: canonical.CanonicalRequest) -> None:
    request.tools = fields.read_list("tools", _parse_tool)
    if (choice := fields.read("tool_choice", dict)) is None:
        return
    request.source_fields["tool_choice"] = choice
    if (disable_parallel := choice.get("disable_parallel_tool_use")) is not None:
        request.parallel_tools = not disable_parallel
    match choice:
        case {"type": "auto" | "none" as mode}:
            request.tool_choice = canonical.CanonicalToolChoice(mode)
        case {"type": "any"}:
            request.tool_choice = canonical.CanonicalToolChoice("required")
        case {"type": "tool", "name": str(name)}:
            request.tool_choice = canonical.CanonicalToolChoice("named", [name])
        case _:
            raise make_unknown_value_error(choice.get("type"), "tool_choice.type", "auto, any, tool, none")


def _parse_tool(raw: object, path: str) -> canonical.CanonicalTool | canonical.OpaqueContent:
    fields = FieldReader(raw, path)
    if fields.unread.get("type", "custom") not in ("custom", None):
        return canonical.OpaqueContent(str(fields.unread["type"]), fields.unread)
    name, description = fields.require("name", str), fields.read("description", str)
    return canonical.CanonicalTool(
        name, description, fields.read("input_schema", dict), fields.read("strict", bool), fields.unread
    )


def render(request: canonical.CanonicalRequest, target_model: TargetModel, changes: ChangeReport) -> canonical.Json:
    body: canonical.Json = {"model": target_model.model or request.model}
    if request.dialect == "anthropic":
        body["messages"] = [_render_message(message) for message in request.messages]
        body |= FIELD_NAMES.render_copied_fields(request)
        if request.tools:
            body["tools"] = [_render_tool(tool) for tool in request.tools]
        return {**body, **request.source_fields, **request.extra}
    _move_system_messages(request, target_model, changes)
    _report_changed_calls(request, changes)
    body["messages"] = [
        _render_message(message) for message in merge_adjacent_messages(request.messages, roles=("user", "assistant"))
    ]
    if request.system:
        body["system"] = render_content(request.system, "auto")
    if request.max_output is None:
        request.max_output = target_model.max_output or DEFAULT_MAX_TOKENS
        changes.report("max_output", f"anthropic requires a limit, set to {request.max_output}")
    if request.tools:
        _relax_forced_tool_choice(request, target_model, changes)
        body["tools"] = [_render_tool(_adapt_tool(tool, target_model, changes)) for tool in request.tools]
        _render_tool_choice(request, body, changes)
    body |= render_reasoning(request, target_model, changes)
    _remove_rejected_sampling_fields(request, target_model, "thinking" in body, changes)
    body |= FIELD_NAMES.render_copied_fields(request)
    if request.response_format:
        _render_response_format(request.response_format, target_model, body, changes)
    if request.user:
        body["metadata"] = {"user_id": request.user}
    changes.report_unsupported(request.metadata or None, "metadata", "anthropic")
    for name in ("seed", "presence_penalty", "frequency_penalty", "logprobs", "verbosity"):
        changes.report_unsupported(getattr(request, name), name, "anthropic")
    return body


def _render_message(message: canonical.CanonicalMessage) -> canonical.Json:
    result: canonical.Json = {"role": message.role}
    if message.parts or message.shape != "absent":
        result["content"] = render_content(message.parts, message.shape)
    return {**result, **message.extra}


def _move_system_messages(
    request: canonical.CanonicalRequest, target_model: TargetModel, changes: ChangeReport
) -> None:
    """Move system messages to the `system` field.

    A system message after the first user message stays in place if the model accepts system messages there.
    """
    rest: list[canonical.CanonicalMessage] = []
    for message in request.messages:
        if message.role not in ("system", "developer"):
            rest.append(message)
        elif not rest:
            request.system += message.parts
        elif target_model.claude_supports_late_system_messages and rest[-1].role in ("user", "tool"):
            rest.append(canonical.CanonicalMessage("system", message.parts, "auto"))
        else:
            request.system += message.parts
            changes.report("system", "later system messages were moved to the beginning", subfield=".role")
    request.messages = rest


def _report_changed_calls(request: canonical.CanonicalRequest, changes: ChangeReport) -> None:
    for message in request.messages:
        for part in message.parts:
            if isinstance(part, canonical.ToolCallContent):
                if parse_object(part.arguments) is None:
                    changes.report(
                        "messages", "arguments that are not a JSON object were replaced by {}", subfield=".tool_calls"
                    )
                if make_safe_tool_id(part.id) != part.id:
                    changes.report(
                        "messages", "characters that anthropic rejects were replaced", subfield=".tool_call_id"
                    )


def _adapt_tool(
    tool: canonical.CanonicalTool | canonical.OpaqueContent, target_model: TargetModel, changes: ChangeReport
) -> canonical.CanonicalTool | canonical.OpaqueContent:
    if isinstance(tool, canonical.OpaqueContent) or not tool.strict:
        return tool
    if target_model.claude_supports_schemas:
        return replace(tool, schema=_make_enforceable_schema(tool.schema or _EMPTY_SCHEMA, "tools[]", changes))
    changes.report("tools[]", "this model does not support strict schemas", subfield=".strict")
    return replace(tool, strict=None)


def _render_tool(tool: canonical.CanonicalTool | canonical.OpaqueContent) -> canonical.Json:
    if isinstance(tool, canonical.OpaqueContent):
        return tool.raw
    result: canonical.Json = {"name": tool.name}
    result |= {} if tool.description is None else {"description": tool.description}
    result["input_schema"] = tool.schema if tool.schema is not None else _EMPTY_SCHEMA
    result |= {} if tool.strict is None else {"strict": tool.strict}
    return {**result, **tool.extra}


def _relax_forced_tool_choice(
    request: canonical.CanonicalRequest, target_model: TargetModel, changes: ChangeReport
) -> None:
    choice = request.tool_choice
    if target_model.claude_rejects_forced_tools and choice and choice.mode in ("required", "named"):
        request.tool_choice = canonical.CanonicalToolChoice("auto", choice.names)
        changes.report("tool_choice", "this model cannot be forced to call a tool")


def _render_tool_choice(request: canonical.CanonicalRequest, body: canonical.Json, changes: ChangeReport) -> None:
    choice = request.tool_choice
    result: canonical.Json | None = None
    if choice:
        kinds = {"auto": "auto", "none": "none", "required": "any", "named": "tool"}
        result = {"type": kinds[choice.mode]}
        if choice.mode == "named":
            result["name"] = choice.names[0]
        elif choice.names:  # Anthropic cannot restrict the choice to several tools: the others are removed
            body["tools"] = [tool for tool in body["tools"] if tool["name"] in choice.names]
            changes.report("tool_choice", "tools that are not allowed were removed")
    if request.parallel_tools is not None and (choice is None or choice.mode != "none"):
        result = {**(result or {"type": "auto"}), "disable_parallel_tool_use": not request.parallel_tools}
    if result:
        body["tool_choice"] = result


def _remove_rejected_sampling_fields(
    request: canonical.CanonicalRequest, target_model: TargetModel, is_thinking: bool, changes: ChangeReport
) -> None:
    """Remove the sampling fields that the Claude model rejects.

    Newer models reject temperature, top_p and top_k. Older models reject some of these fields, and
    more of them if thinking is enabled.
    """
    if target_model.claude_version is None:
        return
    if request.temperature is not None and request.temperature > 1:
        request.temperature = 1.0
        changes.report("temperature", "anthropic accepts 0 to 1")
    rejected: list[str] = []
    if not target_model.claude_supports_sampling:
        rejected = ["temperature", "top_p", "top_k"]
    elif is_thinking:
        rejected = ["temperature", "top_k"]
    elif request.temperature is not None and target_model.claude_version >= (4, 1):
        rejected = ["top_p"]
    for name in rejected:
        if getattr(request, name) is not None:
            setattr(request, name, None)
            reason = (
                "not accepted together with temperature"
                if name == "top_p" and target_model.claude_supports_sampling
                else "this model does not accept it"
            )
            changes.report(
                name,
                "this model does not accept it while thinking"
                if is_thinking and target_model.claude_supports_sampling
                else reason,
            )


def _render_response_format(
    response_format: canonical.ResponseFormat, target_model: TargetModel, body: canonical.Json, changes: ChangeReport
) -> None:
    if response_format.kind == "text":
        return
    if response_format.kind == "json":
        changes.report("response_format", "anthropic requires a schema; ask for JSON in the prompt")
    elif not target_model.claude_supports_schemas:
        changes.report("response_format", "this model does not support schemas; ask for JSON in the prompt")
    else:
        schema = _make_enforceable_schema(response_format.schema, "response_format", changes)
        body.setdefault("output_config", {})["format"] = {"type": "json_schema", "schema": schema}


def _make_enforceable_schema(schema: canonical.Json | None, field: str, changes: ChangeReport) -> Any:
    """Return a schema that Claude can enforce: only known keywords, and no additional properties."""
    unsupported = "anthropic does not support this schema keyword"
    schema = restrict_keywords(
        schema, ANTHROPIC_KEYWORDS, lambda keyword: changes.report(field, unsupported, subfield=f".{keyword}")
    )
    return forbid_additional_properties(
        schema, lambda keyword: changes.report(field, "set to false, as anthropic requires", subfield=f".{keyword}")
    )
