"""Converts an Anthropic Messages request to and from the canonical form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from emberline.gateway.dialects.adapt import merged
from emberline.gateway.dialects.anthropic.content import (
    object_of,
    parse_blocks,
    parse_message,
    render_content,
    tool_id,
)
from emberline.gateway.dialects.anthropic.thinking import EFFORTS, parse_reasoning, render_reasoning
from emberline.gateway.dialects.anthropic.words import WORDS
from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.fields import Fields, each, unknown
from emberline.gateway.dialects.inner import (
    Conversation,
    Json,
    Message,
    Opaque,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from emberline.gateway.dialects.recipient import Recipient
from emberline.gateway.dialects.schemas import ANTHROPIC, closed, restricted

DEFAULT_MAX_TOKENS = 4096
_NO_ARGUMENTS: Json = {"type": "object", "properties": {}}


def parse(body: Json) -> Conversation:
    fields = Fields(body, "")
    request = Conversation("anthropic", fields.take("model", str, ""))
    request.messages = each(fields.need("messages", list), "messages", parse_message)
    if (system := fields.raw("system")) is not None:
        request.system, _ = parse_blocks(system, "system")
        request.kept["system"] = system
    WORDS.take(fields, request)
    parse_reasoning(fields, request)
    if (config := fields.take("output_config", dict)) is not None:
        known = ("format", "effort") if config.get("effort") in EFFORTS else ("format",)
        request.keep("output_config", config, read=known)
        request.response_format = _parse_format(config.get("format"), "output_config.format")
    if (response_format := fields.take("output_format", dict)) is not None:  # older name of output_config.format
        request.kept["output_format"] = response_format
        request.response_format = request.response_format or _parse_format(response_format, "output_format")
    _parse_tools(fields, request)
    if (metadata := fields.take("metadata", dict)) is not None:
        request.keep("metadata", metadata, read=("user_id",))
        user = metadata.get("user_id")
        request.user = user if isinstance(user, str) else None
    request.extra = fields.left
    return request


def _parse_format(raw: object, path: str) -> ResponseFormat | None:
    match raw:
        case {"type": "json_schema", "schema": dict(schema)}:
            return ResponseFormat("schema", schema)
        case None:
            return None
    raise unknown(raw, path, "json_schema")


def _parse_tools(fields: Fields, request: Conversation) -> None:
    request.tools = fields.each("tools", _parse_tool)
    if (choice := fields.take("tool_choice", dict)) is None:
        return
    request.kept["tool_choice"] = choice
    if (alone := choice.get("disable_parallel_tool_use")) is not None:
        request.parallel_tools = not alone
    match choice:
        case {"type": "auto" | "none" as mode}:
            request.tool_choice = ToolChoice(mode)
        case {"type": "any"}:
            request.tool_choice = ToolChoice("required")
        case {"type": "tool", "name": str(name)}:
            request.tool_choice = ToolChoice("named", [name])
        case _:
            raise unknown(choice.get("type"), "tool_choice.type", "auto, any, tool, none")


def _parse_tool(raw: object, path: str) -> Tool | Opaque:
    fields = Fields(raw, path)
    if fields.left.get("type", "custom") not in ("custom", None):
        return Opaque(str(fields.left["type"]), fields.left)
    name, description = fields.need("name", str), fields.take("description", str)
    return Tool(name, description, fields.take("input_schema", dict), fields.take("strict", bool), fields.left)


def render(request: Conversation, target_model: Recipient, changes: Changes) -> Json:
    body: Json = {"model": target_model.model or request.model}
    if request.dialect == "anthropic":
        body["messages"] = [_render_message(message) for message in request.messages]
        body |= WORDS.said(request)
        if request.tools:
            body["tools"] = [_render_tool(tool) for tool in request.tools]
        return {**body, **request.kept, **request.extra}
    _hoist_system(request, target_model, changes)
    _check_calls(request, changes)
    body["messages"] = [_render_message(message) for message in merged(request.messages, roles=("user", "assistant"))]
    if request.system:
        body["system"] = render_content(request.system, "auto")
    if request.max_output is None:
        request.max_output = target_model.max_output or DEFAULT_MAX_TOKENS
        changes.say("max_output", f"anthropic requires a limit, set to {request.max_output}")
    if request.tools:
        _unforce(request, target_model, changes)
        body["tools"] = [_render_tool(_fit_tool(tool, target_model, changes)) for tool in request.tools]
        _render_choice(request, body, changes)
    body |= render_reasoning(request, target_model, changes)
    _limit_sampling(request, target_model, "thinking" in body, changes)
    body |= WORDS.said(request)
    if request.response_format:
        _render_format(request.response_format, target_model, body, changes)
    if request.user:
        body["metadata"] = {"user_id": request.user}
    changes.dropped(request.metadata or None, "metadata", "anthropic")
    for name in ("seed", "presence_penalty", "frequency_penalty", "logprobs", "verbosity"):
        changes.dropped(getattr(request, name), name, "anthropic")
    return body


def _render_message(message: Message) -> Json:
    result: Json = {"role": message.role}
    if message.parts or message.shape != "absent":
        result["content"] = render_content(message.parts, message.shape)
    return {**result, **message.extra}


def _hoist_system(request: Conversation, target_model: Recipient, changes: Changes) -> None:
    """Move system messages to `system`, except later ones that the model accepts in place."""
    rest: list[Message] = []
    for message in request.messages:
        if message.role not in ("system", "developer"):
            rest.append(message)
        elif not rest:
            request.system += message.parts
        elif target_model.claude_hears_system_later and rest[-1].role in ("user", "tool"):
            rest.append(Message("system", message.parts, "auto"))
        else:
            request.system += message.parts
            changes.say("system", "later system messages were moved to the beginning", within=".role")
    request.messages = rest


def _check_calls(request: Conversation, changes: Changes) -> None:
    for message in request.messages:
        for part in message.parts:
            if isinstance(part, ToolCall):
                if object_of(part.arguments) is None:
                    changes.say(
                        "messages", "arguments that are not a JSON object were replaced by {}", within=".tool_calls"
                    )
                if tool_id(part.id) != part.id:
                    changes.say("messages", "characters that anthropic rejects were replaced", within=".tool_call_id")


def _fit_tool(tool: Tool | Opaque, target_model: Recipient, changes: Changes) -> Tool | Opaque:
    if isinstance(tool, Opaque) or not tool.strict:
        return tool
    if target_model.claude_has_schemas:
        return replace(tool, schema=_kept_to(tool.schema or _NO_ARGUMENTS, "tools[]", changes))
    changes.say("tools[]", "this model does not support strict schemas", within=".strict")
    return replace(tool, strict=None)


def _render_tool(tool: Tool | Opaque) -> Json:
    if isinstance(tool, Opaque):
        return tool.raw
    result: Json = {"name": tool.name}
    result |= {} if tool.description is None else {"description": tool.description}
    result["input_schema"] = tool.schema if tool.schema is not None else _NO_ARGUMENTS
    result |= {} if tool.strict is None else {"strict": tool.strict}
    return {**result, **tool.extra}


def _unforce(request: Conversation, target_model: Recipient, changes: Changes) -> None:
    choice = request.tool_choice
    if target_model.claude_is_never_forced and choice and choice.mode in ("required", "named"):
        request.tool_choice = ToolChoice("auto", choice.names)
        changes.say("tool_choice", "this model cannot be forced to call a tool")


def _render_choice(request: Conversation, body: Json, changes: Changes) -> None:
    choice = request.tool_choice
    result: Json | None = None
    if choice:
        kinds = {"auto": "auto", "none": "none", "required": "any", "named": "tool"}
        result = {"type": kinds[choice.mode]}
        if choice.mode == "named":
            result["name"] = choice.names[0]
        elif choice.names:  # Anthropic cannot restrict the choice to several tools: the others are removed
            body["tools"] = [tool for tool in body["tools"] if tool["name"] in choice.names]
            changes.say("tool_choice", "tools that are not allowed were removed")
    if request.parallel_tools is not None and (choice is None or choice.mode != "none"):
        result = {**(result or {"type": "auto"}), "disable_parallel_tool_use": not request.parallel_tools}
    if result:
        body["tool_choice"] = result


def _limit_sampling(request: Conversation, target_model: Recipient, is_thinking: bool, changes: Changes) -> None:
    """Remove the sampling fields that Claude rejects.

    Later models reject all of them, earlier ones some, and more while thinking.
    """
    if target_model.claude is None:
        return
    if request.temperature is not None and request.temperature > 1:
        request.temperature = 1.0
        changes.say("temperature", "anthropic accepts 0 to 1")
    refused: list[str] = []
    if not target_model.claude_has_sampling:
        refused = ["temperature", "top_p", "top_k"]
    elif is_thinking:
        refused = ["temperature", "top_k"]
    elif request.temperature is not None and target_model.claude >= (4, 1):
        refused = ["top_p"]
    for name in refused:
        if getattr(request, name) is not None:
            setattr(request, name, None)
            why = (
                "beside temperature"
                if name == "top_p" and target_model.claude_has_sampling
                else "this model takes none"
            )
            changes.say(
                name,
                "this model does not accept it while thinking"
                if is_thinking and target_model.claude_has_sampling
                else why,
            )


def _render_format(response_format: ResponseFormat, target_model: Recipient, body: Json, changes: Changes) -> None:
    if response_format.kind == "text":
        return
    if response_format.kind == "json":
        changes.say("response_format", "anthropic requires a schema; ask for JSON in the prompt")
    elif not target_model.claude_has_schemas:
        changes.say("response_format", "this model does not support schemas; ask for JSON in the prompt")
    else:
        schema = _kept_to(response_format.schema, "response_format", changes)
        body.setdefault("output_config", {})["format"] = {"type": "json_schema", "schema": schema}


def _kept_to(schema: Json | None, field: str, changes: Changes) -> Any:
    """Return the schema in the form that Claude can enforce: known keywords only, and closed objects."""
    lost = "anthropic does not support this schema keyword"
    schema = restricted(schema, ANTHROPIC, lambda word: changes.say(field, lost, within=f".{word}"))
    return closed(schema, lambda word: changes.say(field, "set to false, as anthropic requires", within=f".{word}"))
