"""A messages request of Anthropic's, and the inner form's Conversation."""

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
    said = Fields(body, "")
    asked = Conversation("anthropic", said.take("model", str, ""))
    asked.messages = each(said.need("messages", list), "messages", parse_message)
    if (system := said.raw("system")) is not None:
        asked.system, _ = parse_blocks(system, "system")
        asked.kept["system"] = system
    WORDS.take(said, asked)
    parse_reasoning(said, asked)
    if (config := said.take("output_config", dict)) is not None:
        known = ("format", "effort") if config.get("effort") in EFFORTS else ("format",)
        asked.keep("output_config", config, read=known)
        asked.response_format = _parse_format(config.get("format"), "output_config.format")
    if (form := said.take("output_format", dict)) is not None:  # where it was before
        asked.kept["output_format"] = form
        asked.response_format = asked.response_format or _parse_format(form, "output_format")
    _parse_tools(said, asked)
    if (metadata := said.take("metadata", dict)) is not None:
        asked.keep("metadata", metadata, read=("user_id",))
        user = metadata.get("user_id")
        asked.user = user if isinstance(user, str) else None
    asked.extra = said.left
    return asked


def _parse_format(raw: object, path: str) -> ResponseFormat | None:
    match raw:
        case {"type": "json_schema", "schema": dict(schema)}:
            return ResponseFormat("schema", schema)
        case None:
            return None
    raise unknown(raw, path, "json_schema")


def _parse_tools(said: Fields, asked: Conversation) -> None:
    asked.tools = said.each("tools", _parse_tool)
    if (choice := said.take("tool_choice", dict)) is None:
        return
    asked.kept["tool_choice"] = choice
    if (alone := choice.get("disable_parallel_tool_use")) is not None:
        asked.parallel_tools = not alone
    match choice:
        case {"type": "auto" | "none" as mode}:
            asked.tool_choice = ToolChoice(mode)
        case {"type": "any"}:
            asked.tool_choice = ToolChoice("required")
        case {"type": "tool", "name": str(name)}:
            asked.tool_choice = ToolChoice("named", [name])
        case _:
            raise unknown(choice.get("type"), "tool_choice.type", "auto, any, tool, none")


def _parse_tool(raw: object, path: str) -> Tool | Opaque:
    said = Fields(raw, path)
    if said.left.get("type", "custom") not in ("custom", None):
        return Opaque(str(said.left["type"]), said.left)
    name, about = said.need("name", str), said.take("description", str)
    return Tool(name, about, said.take("input_schema", dict), said.take("strict", bool), said.left)


def render(asked: Conversation, to: Recipient, changes: Changes) -> Json:
    body: Json = {"model": to.model or asked.model}
    if asked.dialect == "anthropic":
        body["messages"] = [_render_message(message) for message in asked.messages]
        body |= WORDS.said(asked)
        if asked.tools:
            body["tools"] = [_render_tool(tool) for tool in asked.tools]
        return {**body, **asked.kept, **asked.extra}
    _hoist_system(asked, to, changes)
    _check_calls(asked, changes)
    body["messages"] = [_render_message(message) for message in merged(asked.messages, roles=("user", "assistant"))]
    if asked.system:
        body["system"] = render_content(asked.system, "auto")
    if asked.max_output is None:
        asked.max_output = to.max_output or DEFAULT_MAX_TOKENS
        changes.say("max_output", f"anthropic needs a limit: {asked.max_output}")
    if asked.tools:
        _unforce(asked, to, changes)
        body["tools"] = [_render_tool(_fit_tool(tool, to, changes)) for tool in asked.tools]
        _render_choice(asked, body, changes)
    body |= render_reasoning(asked, to, changes)
    _limit_sampling(asked, to, "thinking" in body, changes)
    body |= WORDS.said(asked)
    if asked.response_format:
        _render_format(asked.response_format, to, body, changes)
    if asked.user:
        body["metadata"] = {"user_id": asked.user}
    changes.dropped(asked.metadata or None, "metadata", "anthropic")
    for name in ("seed", "presence_penalty", "frequency_penalty", "logprobs", "verbosity"):
        changes.dropped(getattr(asked, name), name, "anthropic")
    return body


def _render_message(message: Message) -> Json:
    made: Json = {"role": message.role}
    if message.parts or message.shape != "absent":
        made["content"] = render_content(message.parts, message.shape)
    return {**made, **message.extra}


def _hoist_system(asked: Conversation, to: Recipient, changes: Changes) -> None:
    """What the system says first stands apart; later it has a role, which older models do not know."""
    rest: list[Message] = []
    for message in asked.messages:
        if message.role not in ("system", "developer"):
            rest.append(message)
        elif not rest:
            asked.system += message.parts
        elif to.claude_hears_system_later and rest[-1].role in ("user", "tool"):
            rest.append(Message("system", message.parts, "auto"))
        else:
            asked.system += message.parts
            changes.say("system", "what the system says later was moved to the beginning", within=".role")
    asked.messages = rest


def _check_calls(asked: Conversation, changes: Changes) -> None:
    for message in asked.messages:
        for part in message.parts:
            if isinstance(part, ToolCall):
                if object_of(part.arguments) is None:
                    changes.say("messages", "arguments that are no JSON object became {}", within=".tool_calls")
                if tool_id(part.id) != part.id:
                    changes.say("messages", "ids have signs that anthropic refuses", within=".tool_call_id")


def _fit_tool(tool: Tool | Opaque, to: Recipient, changes: Changes) -> Tool | Opaque:
    if isinstance(tool, Opaque) or not tool.strict:
        return tool
    if to.claude_has_schemas:
        return replace(tool, schema=_kept_to(tool.schema or _NO_ARGUMENTS, "tools[]", changes))
    changes.say("tools[]", "this model keeps to no schema", within=".strict")
    return replace(tool, strict=None)


def _render_tool(tool: Tool | Opaque) -> Json:
    if isinstance(tool, Opaque):
        return tool.raw
    made: Json = {"name": tool.name}
    made |= {} if tool.description is None else {"description": tool.description}
    made["input_schema"] = tool.schema if tool.schema is not None else _NO_ARGUMENTS
    made |= {} if tool.strict is None else {"strict": tool.strict}
    return {**made, **tool.extra}


def _unforce(asked: Conversation, to: Recipient, changes: Changes) -> None:
    choice = asked.tool_choice
    if to.claude_is_never_forced and choice and choice.mode in ("required", "named"):
        asked.tool_choice = ToolChoice("auto", choice.names)
        changes.say("tool_choice", "this model cannot be forced to call a tool")


def _render_choice(asked: Conversation, body: Json, changes: Changes) -> None:
    choice = asked.tool_choice
    made: Json | None = None
    if choice:
        kinds = {"auto": "auto", "none": "none", "required": "any", "named": "tool"}
        made = {"type": kinds[choice.mode]}
        if choice.mode == "named":
            made["name"] = choice.names[0]
        elif choice.names:  # which others cannot be named: they are not offered
            body["tools"] = [tool for tool in body["tools"] if tool["name"] in choice.names]
            changes.say("tool_choice", "tools that are not allowed were left out")
    if asked.parallel_tools is not None and (choice is None or choice.mode != "none"):
        made = {**(made or {"type": "auto"}), "disable_parallel_tool_use": not asked.parallel_tools}
    if made:
        body["tool_choice"] = made


def _limit_sampling(asked: Conversation, to: Recipient, thinks: bool, changes: Changes) -> None:
    """What Claude refuses: all of it in later models; in earlier ones some, and more while it thinks."""
    if to.claude is None:
        return
    if asked.temperature is not None and asked.temperature > 1:
        asked.temperature = 1.0
        changes.say("temperature", "anthropic knows 0 to 1")
    refused: list[str] = []
    if not to.claude_has_sampling:
        refused = ["temperature", "top_p", "top_k"]
    elif thinks:
        refused = ["temperature", "top_k"]
    elif asked.temperature is not None and to.claude >= (4, 1):
        refused = ["top_p"]
    for name in refused:
        if getattr(asked, name) is not None:
            setattr(asked, name, None)
            why = "beside temperature" if name == "top_p" and to.claude_has_sampling else "this model takes none"
            changes.say(name, "this model takes none while it thinks" if thinks and to.claude_has_sampling else why)


def _render_format(form: ResponseFormat, to: Recipient, body: Json, changes: Changes) -> None:
    if form.kind == "text":
        return
    if form.kind == "json":
        changes.say("response_format", "anthropic needs a schema; the prompt has to ask for JSON")
    elif not to.claude_has_schemas:
        changes.say("response_format", "this model keeps to no schema; the prompt has to ask for JSON")
    else:
        schema = _kept_to(form.schema, "response_format", changes)
        body.setdefault("output_config", {})["format"] = {"type": "json_schema", "schema": schema}


def _kept_to(schema: Json | None, field: str, changes: Changes) -> Any:
    """A schema that Claude is held to has fewer words, and closed objects."""
    lost = "anthropic does not know this word of schemas"
    schema = restricted(schema, ANTHROPIC, lambda word: changes.say(field, lost, within=f".{word}"))
    return closed(schema, lambda word: changes.say(field, "objects were closed", within=f".{word}"))
