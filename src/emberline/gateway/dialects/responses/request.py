"""Converts a Responses request to and from the canonical form."""

from __future__ import annotations

from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.change_report import OPENAI_DIALECTS, SHARED_OPENAI_FIELDS, ChangeReport
from emberline.gateway.dialects.chat.request import choose_effort, find_effort, parse_tools
from emberline.gateway.dialects.field_reader import FieldReader, make_unknown_value_error
from emberline.gateway.dialects.responses.field_names import FIELD_NAMES
from emberline.gateway.dialects.responses.items import parse_item, render_items
from emberline.gateway.dialects.target_model import TargetModel

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"


def parse(body: canonical.Json) -> canonical.CanonicalRequest:
    fields = FieldReader(body, "")
    request = canonical.CanonicalRequest("openai-responses", fields.read("model", str, ""))
    if isinstance(prompt := fields.unread.get("input"), str):
        request.messages, request.source_fields["input"] = (
            [canonical.CanonicalMessage("user", [canonical.TextContent(prompt)], "text")],
            fields.unread.pop("input"),
        )
    else:
        request.messages = fields.read_list("input", parse_item)
    if (instructions := fields.read("instructions", str)) is not None:
        request.system, request.source_fields["instructions"] = [canonical.TextContent(instructions)], instructions
    FIELD_NAMES.copy_fields_to_request(fields, request)
    parse_tools(fields, request, _parse_tool)
    if (text := fields.read("text", dict)) is not None:
        request.keep_source_field("text", text, translated_subfields=("format", "verbosity"))
        request.verbosity, request.response_format = text.get("verbosity"), _parse_response_format(text.get("format"))
    if (reasoning := fields.read("reasoning", dict)) is not None:
        effort, summary = find_effort(reasoning.get("effort")), reasoning.get("summary")
        translated = ("summary",) if effort is None else ("effort", "summary")
        request.keep_source_field("reasoning", reasoning, translated_subfields=translated)
        request.reasoning = canonical.ReasoningOptions(effort, None, None if summary is None else True)
    if (include := fields.read("include", list)) is not None:
        request.source_fields["include"] = include
        request.unmapped_fields |= {
            f"include.{name}": True for name in include if name not in (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED_REASONING)
        }
        if INCLUDE_LOGPROBS in include:
            request.logprobs = fields.unread.get("top_logprobs") or 0
    if (top_logprobs := fields.read("top_logprobs", int)) is not None:
        request.source_fields["top_logprobs"] = top_logprobs
        request.logprobs = top_logprobs
    request.extra = fields.unread
    return request


def _parse_tool(raw: object, path: str) -> canonical.CanonicalTool | canonical.OpaqueContent:
    fields = FieldReader(raw, path)
    kind = fields.require("type", str)
    if kind != "function":
        return canonical.OpaqueContent(kind, fields.whole)
    name, description = fields.require("name", str), fields.read("description", str)
    return canonical.CanonicalTool(
        name, description, fields.read("parameters", dict), fields.read("strict", bool), fields.unread
    )


def _parse_response_format(raw: object) -> canonical.ResponseFormat | None:
    match raw:
        case None:
            return None
        case {"type": "text"}:
            return canonical.ResponseFormat("text")
        case {"type": "json_object"}:
            return canonical.ResponseFormat("json")
        case {"type": "json_schema", "schema": dict(schema)}:
            response_format = FieldReader(raw, "text.format")
            name, strict = response_format.read("name", str, ""), response_format.read("strict", bool)
            return canonical.ResponseFormat("schema", schema, name, strict, response_format.read("description", str))
    raise make_unknown_value_error(raw, "text.format", "text, json_object, json_schema")


def render(request: canonical.CanonicalRequest, target_model: TargetModel, changes: ChangeReport) -> canonical.Json:
    body: canonical.Json = {"model": target_model.model or request.model}
    body |= FIELD_NAMES.render_copied_fields(request)
    if request.tools:
        body["tools"] = [_render_tool(tool) for tool in request.tools]
    items = [item for message in request.messages for item in render_items(message)]
    if request.dialect == "openai-responses":
        if items or "input" not in request.extra:
            body["input"] = items
        return {**body, **request.source_fields, **request.extra}
    body |= _render_instructions(request)
    body |= {"input": items, "store": False}
    if request.tool_choice and request.tools:
        body["tool_choice"] = _render_tool_choice(request.tool_choice)
    text: canonical.Json = {} if request.verbosity is None else {"verbosity": request.verbosity}
    text |= {"format": _render_response_format(request.response_format)} if request.response_format else {}
    body |= {"text": text} if text else {}
    include = []
    if request.reasoning and (reasoning := _render_reasoning(request.reasoning, target_model, changes)):
        body["reasoning"] = reasoning
        include.append(INCLUDE_ENCRYPTED_REASONING)
    if request.logprobs is not None:
        include.append(INCLUDE_LOGPROBS)
        body["top_logprobs"] = request.logprobs
    body |= {"include": include} if include else {}
    if request.dialect in OPENAI_DIALECTS:
        body |= {name: value for name, value in request.extra.items() if name in SHARED_OPENAI_FIELDS}
    for name in ("top_k", "stop", "seed", "presence_penalty", "frequency_penalty"):
        changes.report_unsupported(getattr(request, name), name, "openai-responses")
    return body


def _render_instructions(request: canonical.CanonicalRequest) -> canonical.Json:
    texts = [part.text for part in request.system if isinstance(part, canonical.TextContent)]
    return {"instructions": "\n\n".join(texts)} if texts else {}


def _render_tool(tool: canonical.CanonicalTool | canonical.OpaqueContent) -> canonical.Json:
    if isinstance(tool, canonical.OpaqueContent):
        return tool.raw
    result: canonical.Json = {"type": "function", "name": tool.name}
    result |= {} if tool.description is None else {"description": tool.description}
    result |= {} if tool.schema is None and "parameters" in tool.extra else {"parameters": tool.schema}
    # Responses defaults to strict, which schemas that were not written for it do not satisfy.
    result |= {} if tool.strict is None and "strict" in tool.extra else {"strict": bool(tool.strict)}
    return {**result, **tool.extra}


def _render_tool_choice(choice: canonical.CanonicalToolChoice) -> str | canonical.Json:
    if choice.mode == "named":
        return {"type": "function", "name": choice.names[0]}
    if choice.names:
        tools = [{"type": "function", "name": name} for name in choice.names]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return choice.mode


def _render_response_format(response_format: canonical.ResponseFormat) -> canonical.Json:
    if response_format.kind != "schema":
        return {"type": "text" if response_format.kind == "text" else "json_object"}
    result: canonical.Json = {
        "type": "json_schema",
        "name": response_format.name or "reply",
        "schema": response_format.schema,
    }
    result |= {"strict": bool(response_format.strict)}
    return result | ({} if response_format.description is None else {"description": response_format.description})


def _render_reasoning(
    options: canonical.ReasoningOptions, target_model: TargetModel, changes: ChangeReport
) -> canonical.Json:
    effort = choose_effort(options, target_model, changes)
    result: canonical.Json = {} if effort is None else {"effort": effort}
    return result | ({"summary": "auto"} if options.include_reasoning and target_model.gpt_efforts != () else {})
