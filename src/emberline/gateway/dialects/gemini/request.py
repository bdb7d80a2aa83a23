"""A generateContent request of Gemini's, and the inner form's Conversation. The model, and whether it streams, are in
the URL."""

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

_COUNTS = ("maxOutputTokens", "topK", "seed", "candidateCount")  # which may be written 40.0
_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto"}


def parse(body: Json) -> Conversation:
    said = Fields(camel(body), "")
    asked = Conversation("gemini", said.take("model", str, "").removeprefix("models/"))
    if asked.model:
        asked.kept["model"] = camel(body)["model"]
    parser = ContentsParser()
    asked.messages = each(said.need("contents", list), "contents", parser.message)
    if (system := said.take("systemInstruction", dict)) is not None:
        asked.system = parser.message(system, "systemInstruction").parts
        asked.kept["systemInstruction"] = system
    _parse_tools(said, asked)
    if (config := said.take("generationConfig", dict)) is not None:
        left = _parse_config(Fields(config, "generationConfig"), asked)
        asked.keep("generationConfig", config, read=config.keys() - left)
    asked.extra = said.left
    return asked


def _parse_config(config: Fields, asked: Conversation) -> Json:
    """What of it was not understood."""
    for name in _COUNTS:
        if isinstance(value := config.left.get(name), float) and value.is_integer():
            config.left[name] = int(value)
    WORDS.take(config, asked)
    mime, schema = config.take("responseMimeType", str), config.raw("responseJsonSchema")
    if schema is None and (own := config.raw("responseSchema")) is not None:
        schema = from_gemini(own)
    if schema is not None:
        asked.response_format = ResponseFormat("schema", schema)
    elif mime == "application/json":
        asked.response_format = ResponseFormat("json")
    elif mime not in (None, "text/plain"):
        config.left["responseMimeType"] = mime
    if config.take("responseLogprobs", bool):
        asked.logprobs = config.take("logprobs", int, 0)
    asked.reasoning = parse_reasoning(config.take("thinkingConfig", dict))
    return config.left


def _parse_tools(said: Fields, asked: Conversation) -> None:
    if (tools := said.take("tools", list)) is not None:
        asked.kept["tools"] = tools
        for at, raw in enumerate(tools):
            kinds = Fields(raw, f"tools[{at}]")
            rows = kinds.take("functionDeclarations", list, [])
            asked.tools += each(rows, kinds.at("functionDeclarations"), _parse_tool)
            asked.tools += [Opaque(kind, {kind: value}) for kind, value in kinds.left.items()]
    if (config := said.take("toolConfig", dict)) is None:
        return
    asked.keep("toolConfig", config, read=("functionCallingConfig",))
    calling = Fields(config.get("functionCallingConfig") or {}, "toolConfig.functionCallingConfig")
    mode = calling.take("mode", str, "AUTO")
    if mode not in _MODES:
        raise unknown(mode, calling.at("mode"), ", ".join(_MODES))
    names = calling.texts("allowedFunctionNames") or []
    if mode == "VALIDATED":
        calling.left["mode"] = mode  # others only know auto
    asked.unread |= {calling.at(name): value for name, value in calling.left.items()}
    known = "named" if mode == "ANY" and len(names) == 1 else _MODES[mode]
    asked.tool_choice = ToolChoice(known, names)  # type: ignore[arg-type]  # one of the modes


def _parse_tool(raw: object, path: str) -> Tool:
    said = Fields(raw, path)
    name, about = said.need("name", str), said.take("description", str)
    schema = said.raw("parametersJsonSchema")
    if schema is None:
        schema = from_gemini(said.raw("parameters"))
    return Tool(name, about, schema, extra=said.left)


def render(asked: Conversation, to: Recipient, changes: Changes) -> Json:
    if asked.dialect == "gemini":
        contents = [_render_content(message, {}) for message in asked.messages]
        return {"contents": contents, **asked.kept, **asked.extra}
    _hoist_system(asked, changes)
    messages = merged(asked.messages, roles=("user", "assistant"))
    names = {part.id: part.name for m in messages for part in m.parts if isinstance(part, ToolCall)}
    contents = [_render_content(message, names) for message in messages]
    body: Json = {"contents": [content for content in contents if content["parts"]]}
    if to.gemini >= 3:
        _sign_calls(body["contents"], changes)
    if asked.system:
        body["systemInstruction"] = {"parts": render_parts(asked.system, {})}
    if asked.tools:
        body["tools"] = [{"functionDeclarations": [_render_tool(tool, changes) for tool in asked.tools]}]
        _render_choice(asked, body)
    config = WORDS.said(asked)
    if asked.response_format and asked.response_format.kind != "text":
        config |= _render_format(asked.response_format, changes)
    if asked.logprobs is not None:
        config |= {"responseLogprobs": True} | ({"logprobs": asked.logprobs} if asked.logprobs else {})
    if asked.reasoning:
        config["thinkingConfig"] = render_reasoning(asked.reasoning, to, changes)
    if config:
        body["generationConfig"] = config
    if asked.parallel_tools is False:
        changes.say("parallel_tools", "gemini may call several tools at once")
    for name in ("user", "metadata", "verbosity"):
        changes.dropped(getattr(asked, name) or None, name, "gemini")
    return body


def _render_content(message: Message, names: dict[str, str]) -> Json:
    role = {"role": "model" if message.role == "assistant" else "user"}
    extra = message.extra
    if message.shape == "list":  # its own: the role as it was written, or none
        role = {}
    return {**role, "parts": render_parts(message.parts, names), **extra}


def _hoist_system(asked: Conversation, changes: Changes) -> None:
    rest: list[Message] = []
    for message in asked.messages:
        if message.role not in ("system", "developer"):
            rest.append(message)
            continue
        asked.system += message.parts
        if rest:
            changes.say("system", "what the system says later was moved to the beginning", within=".role")
    asked.system = [part for part in asked.system if isinstance(part, Text)]
    asked.messages = rest


def _sign_calls(contents: list[Json], changes: Changes) -> None:
    """The first call of every turn needs a signature; Google names one for those that Gemini did not make."""
    for content in contents:
        first = next((row for row in content["parts"] if "functionCall" in row), None)
        if first is not None and "thoughtSignature" not in first:
            first["thoughtSignature"] = FOREIGN_SEAL
            changes.say("messages", "a call without Gemini's signature is sent with Google's word for that",
                        within=".thoughtSignature")  # fmt: skip


def _render_tool(tool: Tool | Opaque, changes: Changes) -> Json:
    assert isinstance(tool, Tool), "others were taken out"
    made: Json = {"name": tool.name}
    made |= {} if tool.description is None else {"description": tool.description}
    if tool.schema is not None:
        made["parametersJsonSchema"] = restricted(
            tool.schema, GEMINI, lambda word: changes.at(f"tools[].{word}", "gemini does not know this word of schemas")
        )
    return made


def _render_choice(asked: Conversation, body: Json) -> None:
    choice = asked.tool_choice or ToolChoice("auto")
    strict = any(isinstance(tool, Tool) and tool.strict for tool in asked.tools)
    modes = {
        "auto": "VALIDATED" if strict or choice.names else "AUTO",
        "none": "NONE",
        "required": "ANY",
        "named": "ANY",
    }
    calling: Json = {"mode": modes[choice.mode]}
    if choice.names:
        calling["allowedFunctionNames"] = choice.names
    if asked.tool_choice or strict:
        body["toolConfig"] = {"functionCallingConfig": calling}


def _render_format(form: ResponseFormat, changes: Changes) -> Json:
    made: Json = {"responseMimeType": "application/json"}
    if form.kind == "schema":
        made["responseJsonSchema"] = restricted(
            form.schema,
            GEMINI,
            lambda word: changes.say("response_format", "gemini does not know this word of schemas", within=f".{word}"),
        )
    return made
