"""Converts a Responses request to and from the canonical form."""

from __future__ import annotations

from emberline.gateway.dialects.changes import OPENAI, OPENAI_SHARED, Changes
from emberline.gateway.dialects.chat.request import parse_effort, parse_tools, rendered_effort
from emberline.gateway.dialects.fields import Fields, unknown
from emberline.gateway.dialects.inner import (
    Conversation,
    Json,
    Message,
    Opaque,
    Reasoning,
    ResponseFormat,
    Text,
    Tool,
    ToolChoice,
)
from emberline.gateway.dialects.recipient import Recipient
from emberline.gateway.dialects.responses.items import parse_item, render_items
from emberline.gateway.dialects.responses.words import WORDS

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"


def parse(body: Json) -> Conversation:
    fields = Fields(body, "")
    request = Conversation("openai-responses", fields.take("model", str, ""))
    if isinstance(given := fields.left.get("input"), str):
        request.messages, request.kept["input"] = [Message("user", [Text(given)], "text")], fields.left.pop("input")
    else:
        request.messages = fields.each("input", parse_item)
    if (instructions := fields.take("instructions", str)) is not None:
        request.system, request.kept["instructions"] = [Text(instructions)], instructions
    WORDS.take(fields, request)
    parse_tools(fields, request, _parse_tool)
    if (text := fields.take("text", dict)) is not None:
        request.keep("text", text, read=("format", "verbosity"))
        request.verbosity, request.response_format = text.get("verbosity"), _parse_format(text.get("format"))
    if (reasoning := fields.take("reasoning", dict)) is not None:
        request.keep("reasoning", reasoning, read=("effort", "summary"))
        effort, summary = reasoning.get("effort"), reasoning.get("summary")
        known = None if effort is None else parse_effort(effort, "reasoning.effort")
        request.reasoning = Reasoning(known, None, None if summary is None else True)
    if (include := fields.take("include", list)) is not None:
        request.kept["include"] = include
        request.unread |= {f"include.{name}": True for name in include if name not in (LOGPROBS, SEALED)}
        if LOGPROBS in include:
            request.logprobs = fields.left.get("top_logprobs") or 0
    if (top := fields.take("top_logprobs", int)) is not None:
        request.kept["top_logprobs"] = top
        request.logprobs = top
    request.extra = fields.left
    return request


def _parse_tool(raw: object, path: str) -> Tool | Opaque:
    fields = Fields(raw, path)
    kind = fields.need("type", str)
    if kind != "function":
        return Opaque(kind, fields.whole)
    name, description = fields.need("name", str), fields.take("description", str)
    return Tool(name, description, fields.take("parameters", dict), fields.take("strict", bool), fields.left)


def _parse_format(raw: object) -> ResponseFormat | None:
    match raw:
        case None:
            return None
        case {"type": "text"}:
            return ResponseFormat("text")
        case {"type": "json_object"}:
            return ResponseFormat("json")
        case {"type": "json_schema", "schema": dict(schema)}:
            response_format = Fields(raw, "text.format")
            name, strict = response_format.take("name", str, ""), response_format.take("strict", bool)
            return ResponseFormat("schema", schema, name, strict, response_format.take("description", str))
    raise unknown(raw, "text.format", "text, json_object, json_schema")


def render(request: Conversation, target_model: Recipient, changes: Changes) -> Json:
    body: Json = {"model": target_model.model or request.model}
    body |= WORDS.said(request)
    if request.tools:
        body["tools"] = [_render_tool(tool) for tool in request.tools]
    items = [item for message in request.messages for item in render_items(message)]
    if request.dialect == "openai-responses":
        if items or "input" not in request.extra:
            body["input"] = items
        return {**body, **request.kept, **request.extra}
    body |= _instructions(request)
    body |= {"input": items, "store": False}
    if request.tool_choice and request.tools:
        body["tool_choice"] = _render_choice(request.tool_choice)
    text: Json = {} if request.verbosity is None else {"verbosity": request.verbosity}
    text |= {"format": _render_format(request.response_format)} if request.response_format else {}
    body |= {"text": text} if text else {}
    include = []
    if request.reasoning and (reasoning := _render_reasoning(request.reasoning, target_model, changes)):
        body["reasoning"] = reasoning
        include.append(SEALED)
    if request.logprobs is not None:
        include.append(LOGPROBS)
        body["top_logprobs"] = request.logprobs
    body |= {"include": include} if include else {}
    if request.dialect in OPENAI:
        body |= {name: value for name, value in request.extra.items() if name in OPENAI_SHARED}
    for name in ("top_k", "stop", "seed", "presence_penalty", "frequency_penalty"):
        changes.dropped(getattr(request, name), name, "openai-responses")
    return body


def _instructions(request: Conversation) -> Json:
    texts = [part.text for part in request.system if isinstance(part, Text)]
    return {"instructions": "\n\n".join(texts)} if texts else {}


def _render_tool(tool: Tool | Opaque) -> Json:
    if isinstance(tool, Opaque):
        return tool.raw
    result: Json = {"type": "function", "name": tool.name}
    result |= {} if tool.description is None else {"description": tool.description}
    result |= {} if tool.schema is None and "parameters" in tool.extra else {"parameters": tool.schema}
    # Responses defaults to strict, which schemas that were not written for it do not satisfy.
    result |= {} if tool.strict is None and "strict" in tool.extra else {"strict": bool(tool.strict)}
    return {**result, **tool.extra}


def _render_choice(choice: ToolChoice) -> str | Json:
    if choice.mode == "named":
        return {"type": "function", "name": choice.names[0]}
    if choice.names:
        tools = [{"type": "function", "name": name} for name in choice.names]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return choice.mode


def _render_format(response_format: ResponseFormat) -> Json:
    if response_format.kind != "schema":
        return {"type": "text" if response_format.kind == "text" else "json_object"}
    result: Json = {"type": "json_schema", "name": response_format.name or "reply", "schema": response_format.schema}
    result |= {"strict": bool(response_format.strict)}
    return result | ({} if response_format.description is None else {"description": response_format.description})


def _render_reasoning(options: Reasoning, target_model: Recipient, changes: Changes) -> Json:
    effort = rendered_effort(options, target_model, changes)
    result: Json = {} if effort is None else {"effort": effort}
    return result | ({"summary": "auto"} if options.show and target_model.gpt_efforts != () else {})
