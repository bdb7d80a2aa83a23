"""Converts a generateContent request to and from the canonical form.

The model, and whether the reply is streamed, are in the URL and not in the body.
"""

from __future__ import annotations

from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.adapt import merge_adjacent_messages
from emberline.gateway.dialects.change_report import ChangeReport
from emberline.gateway.dialects.field_reader import FieldReader, make_unknown_value_error, parse_rows
from emberline.gateway.dialects.gemini.camel_case import to_camel_case
from emberline.gateway.dialects.gemini.content import FOREIGN_CALL_SIGNATURE, GeminiContentParser, render_parts
from emberline.gateway.dialects.gemini.field_names import FIELD_NAMES
from emberline.gateway.dialects.gemini.thinking import parse_reasoning, render_reasoning
from emberline.gateway.dialects.schemas import GEMINI_KEYWORDS, from_gemini_schema, restrict_keywords
from emberline.gateway.dialects.target_model import TargetModel

_INTEGER_FIELDS = ("maxOutputTokens", "topK", "seed", "candidateCount")  # clients may write them as 40.0
_TOOL_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto"}


def parse(body: canonical.Json) -> canonical.CanonicalRequest:
    body = to_camel_case(body)
    fields = FieldReader(body, "")
    request = canonical.CanonicalRequest("gemini", fields.read("model", str, "").removeprefix("models/"))
    if request.model:
        request.source_fields["model"] = body["model"]
    parser = GeminiContentParser()
    request.messages = parse_rows(fields.require("contents", list), "contents", parser.parse_message)
    if (system := fields.read("systemInstruction", dict)) is not None:
        request.system = parser.parse_message(system, "systemInstruction").parts
        request.source_fields["systemInstruction"] = system
    _parse_tools(fields, request)
    if (config := fields.read("generationConfig", dict)) is not None:
        unmapped = _parse_config(FieldReader(config, "generationConfig"), request)
        request.keep_source_field("generationConfig", config, translated_subfields=config.keys() - unmapped)
    request.extra = fields.unread
    return request


def _parse_config(config: FieldReader, request: canonical.CanonicalRequest) -> canonical.Json:
    """Read generationConfig into `request` and return the fields that have no canonical counterpart."""
    for name in _INTEGER_FIELDS:
        if isinstance(value := config.unread.get(name), float) and value.is_integer():
            config.unread[name] = int(value)
    FIELD_NAMES.copy_fields_to_request(config, request)
    mime, schema = config.read("responseMimeType", str), config.read_any("responseJsonSchema")
    if schema is None and (openapi_schema := config.read_any("responseSchema")) is not None:
        schema = from_gemini_schema(openapi_schema)
    if schema is not None:
        request.response_format = canonical.ResponseFormat("schema", schema)
    elif mime == "application/json":
        request.response_format = canonical.ResponseFormat("json")
    elif mime not in (None, "text/plain"):
        config.unread["responseMimeType"] = mime
    if config.read("responseLogprobs", bool):
        request.logprobs = config.read("logprobs", int, 0)
    request.reasoning = parse_reasoning(config.read("thinkingConfig", dict))
    return config.unread


def _parse_tools(fields: FieldReader, request: canonical.CanonicalRequest) -> None:
    if (tools := fields.read("tools", list)) is not None:
        request.source_fields["tools"] = tools
        for index, raw in enumerate(tools):
            kinds = FieldReader(raw, f"tools[{index}]")
            rows = kinds.read("functionDeclarations", list, [])
            request.tools += parse_rows(rows, kinds.path_of("functionDeclarations"), _parse_tool)
            request.tools += [canonical.OpaqueContent(kind, {kind: value}) for kind, value in kinds.unread.items()]
    if (config := fields.read("toolConfig", dict)) is None:
        return
    request.keep_source_field("toolConfig", config, translated_subfields=("functionCallingConfig",))
    calling = FieldReader(config.get("functionCallingConfig") or {}, "toolConfig.functionCallingConfig")
    mode = calling.read("mode", str, "AUTO")
    if mode not in _TOOL_MODES:
        raise make_unknown_value_error(mode, calling.path_of("mode"), ", ".join(_TOOL_MODES))
    names = calling.read_strings("allowedFunctionNames") or []
    if mode == "VALIDATED":
        calling.unread["mode"] = mode  # other formats have only auto
    request.unmapped_fields |= {calling.path_of(name): value for name, value in calling.unread.items()}
    choice_mode = "named" if mode == "ANY" and len(names) == 1 else _TOOL_MODES[mode]
    request.tool_choice = canonical.CanonicalToolChoice(choice_mode, names)  # type: ignore[arg-type]  # one of the modes


def _parse_tool(raw: object, path: str) -> canonical.CanonicalTool:
    fields = FieldReader(raw, path)
    name, description = fields.require("name", str), fields.read("description", str)
    schema = fields.read_any("parametersJsonSchema")
    if schema is None:
        schema = from_gemini_schema(fields.read_any("parameters"))
    return canonical.CanonicalTool(name, description, schema, extra=fields.unread)


def render(request: canonical.CanonicalRequest, target_model: TargetModel, changes: ChangeReport) -> canonical.Json:
    if request.dialect == "gemini":
        contents = [_render_content(message, {}) for message in request.messages]
        return {"contents": contents, **request.source_fields, **request.extra}
    _move_system_messages(request, changes)
    messages = merge_adjacent_messages(request.messages, roles=("user", "assistant"))
    names = {part.id: part.name for m in messages for part in m.parts if isinstance(part, canonical.ToolCallContent)}
    contents = [_render_content(message, names) for message in messages]
    body: canonical.Json = {"contents": [content for content in contents if content["parts"]]}
    if target_model.gemini_generation >= 3:
        _add_placeholder_signatures(body["contents"], changes)
    if request.system:
        body["systemInstruction"] = {"parts": render_parts(request.system, {})}
    if request.tools:
        body["tools"] = [{"functionDeclarations": [_render_tool(tool, changes) for tool in request.tools]}]
        _render_tool_choice(request, body)
    config = FIELD_NAMES.render_copied_fields(request)
    if request.response_format and request.response_format.kind != "text":
        config |= _render_response_format(request.response_format, changes)
    if request.logprobs is not None:
        config |= {"responseLogprobs": True} | ({"logprobs": request.logprobs} if request.logprobs else {})
    if request.reasoning:
        config["thinkingConfig"] = render_reasoning(request.reasoning, target_model, changes)
    if config:
        body["generationConfig"] = config
    if request.parallel_tools is False:
        changes.report("parallel_tools", "gemini cannot disable parallel tool calls")
    for name in ("user", "metadata", "verbosity"):
        changes.report_unsupported(getattr(request, name) or None, name, "gemini")
    return body


def _render_content(message: canonical.CanonicalMessage, function_names_by_call: dict[str, str]) -> canonical.Json:
    role = {"role": "model" if message.role == "assistant" else "user"}
    extra = message.extra
    if message.shape == "list":  # parsed from Gemini: `extra` has the role as it was written, if any
        role = {}
    return {**role, "parts": render_parts(message.parts, function_names_by_call), **extra}


def _move_system_messages(request: canonical.CanonicalRequest, changes: ChangeReport) -> None:
    rest: list[canonical.CanonicalMessage] = []
    for message in request.messages:
        if message.role not in ("system", "developer"):
            rest.append(message)
            continue
        request.system += message.parts
        if rest:
            changes.report("system", "later system messages were moved to the beginning", subfield=".role")
    request.system = [part for part in request.system if isinstance(part, canonical.TextContent)]
    request.messages = rest


def _add_placeholder_signatures(contents: list[canonical.Json], changes: ChangeReport) -> None:
    """Add Google's placeholder signature, which Gemini 3 requires, to each message's first tool call."""
    for content in contents:
        first = next((row for row in content["parts"] if "functionCall" in row), None)
        if first is not None and "thoughtSignature" not in first:
            first["thoughtSignature"] = FOREIGN_CALL_SIGNATURE
            reason = "Google's placeholder was added to a tool call without a signature"
            changes.report("messages", reason, subfield=".thoughtSignature")


def _render_tool(tool: canonical.CanonicalTool | canonical.OpaqueContent, changes: ChangeReport) -> canonical.Json:
    assert isinstance(tool, canonical.CanonicalTool), "adapt() removed all others"
    result: canonical.Json = {"name": tool.name}
    result |= {} if tool.description is None else {"description": tool.description}
    if tool.schema is not None:
        result["parametersJsonSchema"] = restrict_keywords(
            tool.schema,
            GEMINI_KEYWORDS,
            lambda keyword: changes.report_path(f"tools[].{keyword}", "gemini does not support this schema keyword"),
        )
    return result


def _render_tool_choice(request: canonical.CanonicalRequest, body: canonical.Json) -> None:
    choice = request.tool_choice or canonical.CanonicalToolChoice("auto")
    strict = any(isinstance(tool, canonical.CanonicalTool) and tool.strict for tool in request.tools)
    modes = {
        "auto": "VALIDATED" if strict or choice.names else "AUTO",
        "none": "NONE",
        "required": "ANY",
        "named": "ANY",
    }
    calling: canonical.Json = {"mode": modes[choice.mode]}
    if choice.names:
        calling["allowedFunctionNames"] = choice.names
    if request.tool_choice or strict:
        body["toolConfig"] = {"functionCallingConfig": calling}


def _render_response_format(response_format: canonical.ResponseFormat, changes: ChangeReport) -> canonical.Json:
    result: canonical.Json = {"responseMimeType": "application/json"}
    if response_format.kind == "schema":
        result["responseJsonSchema"] = restrict_keywords(
            response_format.schema,
            GEMINI_KEYWORDS,
            lambda keyword: changes.report(
                "response_format", "gemini does not support this schema keyword", subfield=f".{keyword}"
            ),
        )
    return result
