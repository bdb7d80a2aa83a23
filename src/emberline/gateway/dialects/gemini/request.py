"""Converts a generateContent request to and from the canonical form.

The model, and whether the reply is streamed, are in the URL and not in the body.
"""

from __future__ import annotations

from emberline.gateway.dialects.adapt import merged
from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.fields import Fields, each, unknown
from emberline.gateway.dialects.gemini.content import FOREIGN_SEAL, ContentsParser, render_parts
from emberline.gateway.dialects.gemini.names import camel
from emberline.gateway.dialects.gemini.thinking import parse_reasoning, render_reasoning
from emberline.gateway.dialects.gemini.words import WORDS
from emberline.gateway.dialects.inner import (
    Conversation,
    Json,
    Message,
    Opaque,
    ResponseFormat,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
)
from emberline.gateway.dialects.recipient import Recipient
from emberline.gateway.dialects.schemas import GEMINI, from_gemini, restricted

_COUNTS = ("maxOutputTokens", "topK", "seed", "candidateCount")  # clients may write them as 40.0
_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto"}


def parse(body: Json) -> Conversation:
    fields = Fields(camel(body), "")
    request = Conversation("gemini", fields.take("model", str, "").removeprefix("models/"))
    if request.model:
        request.kept["model"] = camel(body)["model"]
    parser = ContentsParser()
    request.messages = each(fields.need("contents", list), "contents", parser.message)
    if (system := fields.take("systemInstruction", dict)) is not None:
        request.system = parser.message(system, "systemInstruction").parts
        request.kept["systemInstruction"] = system
    _parse_tools(fields, request)
    if (config := fields.take("generationConfig", dict)) is not None:
        left = _parse_config(Fields(config, "generationConfig"), request)
        request.keep("generationConfig", config, read=config.keys() - left)
    request.extra = fields.left
    return request


def _parse_config(config: Fields, request: Conversation) -> Json:
    """Read generationConfig into `request` and return the fields that were not understood."""
    for name in _COUNTS:
        if isinstance(value := config.left.get(name), float) and value.is_integer():
            config.left[name] = int(value)
    WORDS.take(config, request)
    mime, schema = config.take("responseMimeType", str), config.raw("responseJsonSchema")
    if schema is None and (own := config.raw("responseSchema")) is not None:
        schema = from_gemini(own)
    if schema is not None:
        request.response_format = ResponseFormat("schema", schema)
    elif mime == "application/json":
        request.response_format = ResponseFormat("json")
    elif mime not in (None, "text/plain"):
        config.left["responseMimeType"] = mime
    if config.take("responseLogprobs", bool):
        request.logprobs = config.take("logprobs", int, 0)
    request.reasoning = parse_reasoning(config.take("thinkingConfig", dict))
    return config.left


def _parse_tools(fields: Fields, request: Conversation) -> None:
    if (tools := fields.take("tools", list)) is not None:
        request.kept["tools"] = tools
        for index, raw in enumerate(tools):
            kinds = Fields(raw, f"tools[{index}]")
            rows = kinds.take("functionDeclarations", list, [])
            request.tools += each(rows, kinds.at("functionDeclarations"), _parse_tool)
            request.tools += [Opaque(kind, {kind: value}) for kind, value in kinds.left.items()]
    if (config := fields.take("toolConfig", dict)) is None:
        return
    request.keep("toolConfig", config, read=("functionCallingConfig",))
    calling = Fields(config.get("functionCallingConfig") or {}, "toolConfig.functionCallingConfig")
    mode = calling.take("mode", str, "AUTO")
    if mode not in _MODES:
        raise unknown(mode, calling.at("mode"), ", ".join(_MODES))
    names = calling.texts("allowedFunctionNames") or []
    if mode == "VALIDATED":
        calling.left["mode"] = mode  # other formats have only auto
    request.unread |= {calling.at(name): value for name, value in calling.left.items()}
    known = "named" if mode == "ANY" and len(names) == 1 else _MODES[mode]
    request.tool_choice = ToolChoice(known, names)  # type: ignore[arg-type]  # one of the modes


def _parse_tool(raw: object, path: str) -> Tool:
    fields = Fields(raw, path)
    name, description = fields.need("name", str), fields.take("description", str)
    schema = fields.raw("parametersJsonSchema")
    if schema is None:
        schema = from_gemini(fields.raw("parameters"))
    return Tool(name, description, schema, extra=fields.left)


def render(request: Conversation, target_model: Recipient, changes: Changes) -> Json:
    if request.dialect == "gemini":
        contents = [_render_content(message, {}) for message in request.messages]
        return {"contents": contents, **request.kept, **request.extra}
    _hoist_system(request, changes)
    messages = merged(request.messages, roles=("user", "assistant"))
    names = {part.id: part.name for m in messages for part in m.parts if isinstance(part, ToolCall)}
    contents = [_render_content(message, names) for message in messages]
    body: Json = {"contents": [content for content in contents if content["parts"]]}
    if target_model.gemini >= 3:
        _sign_calls(body["contents"], changes)
    if request.system:
        body["systemInstruction"] = {"parts": render_parts(request.system, {})}
    if request.tools:
        body["tools"] = [{"functionDeclarations": [_render_tool(tool, changes) for tool in request.tools]}]
        _render_choice(request, body)
    config = WORDS.said(request)
    if request.response_format and request.response_format.kind != "text":
        config |= _render_format(request.response_format, changes)
    if request.logprobs is not None:
        config |= {"responseLogprobs": True} | ({"logprobs": request.logprobs} if request.logprobs else {})
    if request.reasoning:
        config["thinkingConfig"] = render_reasoning(request.reasoning, target_model, changes)
    if config:
        body["generationConfig"] = config
    if request.parallel_tools is False:
        changes.say("parallel_tools", "gemini cannot disable parallel tool calls")
    for name in ("user", "metadata", "verbosity"):
        changes.dropped(getattr(request, name) or None, name, "gemini")
    return body


def _render_content(message: Message, names: dict[str, str]) -> Json:
    role = {"role": "model" if message.role == "assistant" else "user"}
    extra = message.extra
    if message.shape == "list":  # parsed from Gemini: `extra` has the role as it was written, if any
        role = {}
    return {**role, "parts": render_parts(message.parts, names), **extra}


def _hoist_system(request: Conversation, changes: Changes) -> None:
    rest: list[Message] = []
    for message in request.messages:
        if message.role not in ("system", "developer"):
            rest.append(message)
            continue
        request.system += message.parts
        if rest:
            changes.say("system", "later system messages were moved to the beginning", within=".role")
    request.system = [part for part in request.system if isinstance(part, Text)]
    request.messages = rest


def _sign_calls(contents: list[Json], changes: Changes) -> None:
    """Add Google's placeholder signature: Gemini 3 requires one on the first call of a message."""
    for content in contents:
        first = next((row for row in content["parts"] if "functionCall" in row), None)
        if first is not None and "thoughtSignature" not in first:
            first["thoughtSignature"] = FOREIGN_SEAL
            changes.say("messages", "Google's placeholder was added to a tool call without a signature",
                        within=".thoughtSignature")  # fmt: skip


def _render_tool(tool: Tool | Opaque, changes: Changes) -> Json:
    assert isinstance(tool, Tool), "adapt() removed all others"
    result: Json = {"name": tool.name}
    result |= {} if tool.description is None else {"description": tool.description}
    if tool.schema is not None:
        result["parametersJsonSchema"] = restricted(
            tool.schema,
            GEMINI,
            lambda word: changes.at(f"tools[].{word}", "gemini does not support this schema keyword"),
        )
    return result


def _render_choice(request: Conversation, body: Json) -> None:
    choice = request.tool_choice or ToolChoice("auto")
    strict = any(isinstance(tool, Tool) and tool.strict for tool in request.tools)
    modes = {
        "auto": "VALIDATED" if strict or choice.names else "AUTO",
        "none": "NONE",
        "required": "ANY",
        "named": "ANY",
    }
    calling: Json = {"mode": modes[choice.mode]}
    if choice.names:
        calling["allowedFunctionNames"] = choice.names
    if request.tool_choice or strict:
        body["toolConfig"] = {"functionCallingConfig": calling}


def _render_format(response_format: ResponseFormat, changes: Changes) -> Json:
    result: Json = {"responseMimeType": "application/json"}
    if response_format.kind == "schema":
        result["responseJsonSchema"] = restricted(
            response_format.schema,
            GEMINI,
            lambda word: changes.say(
                "response_format", "gemini does not support this schema keyword", within=f".{word}"
            ),
        )
    return result
