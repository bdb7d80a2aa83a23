"""A Responses request, and the inner form's Conversation."""

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
    said = Fields(body, "")
    asked = Conversation("openai-responses", said.take("model", str, ""))
    if isinstance(given := said.left.get("input"), str):
        asked.messages, asked.kept["input"] = [Message("user", [Text(given)], "text")], said.left.pop("input")
    else:
        asked.messages = said.each("input", parse_item)
    if (instructions := said.take("instructions", str)) is not None:
        asked.system, asked.kept["instructions"] = [Text(instructions)], instructions
    WORDS.take(said, asked)
    parse_tools(said, asked, _parse_tool)
    if (text := said.take("text", dict)) is not None:
        asked.keep("text", text, read=("format", "verbosity"))
        asked.verbosity, asked.response_format = text.get("verbosity"), _parse_format(text.get("format"))
    if (reasoning := said.take("reasoning", dict)) is not None:
        asked.keep("reasoning", reasoning, read=("effort", "summary"))
        effort, summary = reasoning.get("effort"), reasoning.get("summary")
        known = None if effort is None else parse_effort(effort, "reasoning.effort")
        asked.reasoning = Reasoning(known, None, None if summary is None else True)
    if (include := said.take("include", list)) is not None:
        asked.kept["include"] = include
        asked.unread |= {f"include.{name}": True for name in include if name not in (LOGPROBS, SEALED)}
        if LOGPROBS in include:
            asked.logprobs = said.left.get("top_logprobs") or 0
    if (top := said.take("top_logprobs", int)) is not None:
        asked.kept["top_logprobs"] = top
        asked.logprobs = top
    asked.extra = said.left
    return asked


def _parse_tool(raw: object, path: str) -> Tool | Opaque:
    said = Fields(raw, path)
    kind = said.need("type", str)
    if kind != "function":
        return Opaque(kind, said.whole)
    name, about = said.need("name", str), said.take("description", str)
    return Tool(name, about, said.take("parameters", dict), said.take("strict", bool), said.left)


def _parse_format(raw: object) -> ResponseFormat | None:
    match raw:
        case None:
            return None
        case {"type": "text"}:
            return ResponseFormat("text")
        case {"type": "json_object"}:
            return ResponseFormat("json")
        case {"type": "json_schema", "schema": dict(schema)}:
            form = Fields(raw, "text.format")
            name, strict = form.take("name", str, ""), form.take("strict", bool)
            return ResponseFormat("schema", schema, name, strict, form.take("description", str))
    raise unknown(raw, "text.format", "text, json_object, json_schema")


def render(asked: Conversation, to: Recipient, changes: Changes) -> Json:
    body: Json = {"model": to.model or asked.model}
    body |= WORDS.said(asked)
    if asked.tools:
        body["tools"] = [_render_tool(tool) for tool in asked.tools]
    items = [item for message in asked.messages for item in render_items(message)]
    if asked.dialect == "openai-responses":
        if items or "input" not in asked.extra:
            body["input"] = items
        return {**body, **asked.kept, **asked.extra}
    body |= _instructions(asked)
    body |= {"input": items, "store": False}
    if asked.tool_choice and asked.tools:
        body["tool_choice"] = _render_choice(asked.tool_choice)
    text: Json = {} if asked.verbosity is None else {"verbosity": asked.verbosity}
    text |= {"format": _render_format(asked.response_format)} if asked.response_format else {}
    body |= {"text": text} if text else {}
    include = []
    if asked.reasoning and (reasoning := _render_reasoning(asked.reasoning, to, changes)):
        body["reasoning"] = reasoning
        include.append(SEALED)
    if asked.logprobs is not None:
        include.append(LOGPROBS)
        body["top_logprobs"] = asked.logprobs
    body |= {"include": include} if include else {}
    if asked.dialect in OPENAI:
        body |= {name: value for name, value in asked.extra.items() if name in OPENAI_SHARED}
    for name in ("top_k", "stop", "seed", "presence_penalty", "frequency_penalty"):
        changes.dropped(getattr(asked, name), name, "openai-responses")
    return body


def _instructions(asked: Conversation) -> Json:
    texts = [part.text for part in asked.system if isinstance(part, Text)]
    return {"instructions": "\n\n".join(texts)} if texts else {}


def _render_tool(tool: Tool | Opaque) -> Json:
    if isinstance(tool, Opaque):
        return tool.raw
    made: Json = {"type": "function", "name": tool.name}
    made |= {} if tool.description is None else {"description": tool.description}
    made |= {} if tool.schema is None and "parameters" in tool.extra else {"parameters": tool.schema}
    # Left out, responses would make it strict: whoever did not ask for that did not write such a schema.
    made |= {} if tool.strict is None and "strict" in tool.extra else {"strict": bool(tool.strict)}
    return {**made, **tool.extra}


def _render_choice(choice: ToolChoice) -> str | Json:
    if choice.mode == "named":
        return {"type": "function", "name": choice.names[0]}
    if choice.names:
        tools = [{"type": "function", "name": name} for name in choice.names]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return choice.mode


def _render_format(form: ResponseFormat) -> Json:
    if form.kind != "schema":
        return {"type": "text" if form.kind == "text" else "json_object"}
    made: Json = {"type": "json_schema", "name": form.name or "reply", "schema": form.schema}
    made |= {"strict": bool(form.strict)}
    return made | ({} if form.description is None else {"description": form.description})


def _render_reasoning(wish: Reasoning, to: Recipient, changes: Changes) -> Json:
    effort = rendered_effort(wish, to, changes)
    made: Json = {} if effort is None else {"effort": effort}
    return made | ({"summary": "auto"} if wish.show and to.gpt_efforts != () else {})
