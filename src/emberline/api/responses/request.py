"""Requests of POST /v1/responses.

call = parse(body)
writer = stream.ResponsesReplyWriter(call, id, created, fingerprint)

`input` holds the whole conversation: the server has already added the items of previous_response_id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from emberline.api.call import ChatCall, Tool, ToolChoice
from emberline.api.fields import (
    IgnoredField,
    OnlyFalse,
    RedundantField,
    accepts_only,
    drops_types,
    keeps_types,
    without_effect,
)
from emberline.api.openai.accepted import OnlyTrue
from emberline.api.openai.accepted_chat import ChatFields
from emberline.api.openai.grammar import JsonObjectFormat, TextFormat
from emberline.api.openai.messages import FunctionName, add_text_only_hint
from emberline.api.openai.sampling import LogprobCount, StreamOptions
from emberline.api.openai.template import build_template_args, list_template_settings
from emberline.api.parse import WireStruct, decode_request, encode_json_text
from emberline.api.responses.items import HOSTED_ITEMS, Item, build_transcript, continues_last_message
from emberline.api.tool_validation import check_tools
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.core.request import Priority
from emberline.wire.tool_names import join_tool_name

__all__ = ["ResponsesCall", "ResponsesRequest", "parse"]

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"
MetadataKey = Annotated[str, Meta(max_length=64)]
Metadata = Annotated[dict[MetadataKey, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
PositiveCount = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]

_STATE_HINT = "send the whole conversation as input, or continue a stored response with previous_response_id"

# Data that a request may ask for beside the answer. All but the first two are about built-in tools: no reply has any.
IncludeName = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class FunctionFields(WireStruct, kw_only=True):
    name: FunctionName
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    allowed_callers: Annotated[Any, without_effect(["direct"])] = None
    defer_loading: Annotated[Any, without_effect(False)] = None  # the prompt describes every tool
    output_schema: IgnoredField = None


class ResponseTool(FunctionFields, tag_field="type", tag="function"):
    """A function that the client runs."""


class NamespacedTool(FunctionFields, kw_only=True):
    type: Literal["function"]  # not a tag: msgspec would let a lone struct omit its tag


class ToolNamespace(WireStruct, tag_field="type", tag="namespace"):
    """Functions whose names are unique only within the namespace."""

    name: FunctionName
    tools: Annotated[list[NamespacedTool], keeps_types("function")]
    description: str | None = None


class FunctionChoice(WireStruct, tag_field="type", tag="function"):
    name: FunctionName


class AllowedFunction(WireStruct):
    type: Literal["function"]
    name: FunctionName


class AllowedChoice(WireStruct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Meta(min_length=1), keeps_types("function")]


class SchemaFormat(WireStruct, tag_field="type", tag="json_schema"):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None  # no effect: the output always matches the schema


class TextConfig(WireStruct):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: IgnoredField = None


class ReasoningConfig(WireStruct):
    effort: Annotated[str, Meta(max_length=32)] | None = None
    summary: Annotated[Any, without_effect("auto", "concise", "detailed")] = None  # the reply has the whole reasoning
    context: IgnoredField = None
    mode: IgnoredField = None
    generate_summary: IgnoredField = None  # older name of `summary`


class ResponseStreamOptions(StreamOptions):
    include_usage: IgnoredField = None  # the last event always has the usage


class ResponsesRequest(ChatFields, kw_only=True):
    input: str | Annotated[list[Item], Meta(min_length=1), drops_types(*HOSTED_ITEMS)]
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    max_tool_calls: PositiveCount | None = None  # limits built-in tools, which the server does not have
    tools: Annotated[list[ResponseTool | ToolNamespace], keeps_types("function", "namespace")] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[IncludeName], keeps_types(*get_args(IncludeName))] | None = None
    top_logprobs: LogprobCount | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prediction: IgnoredField = None  # a field of chat completions
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's field
    store: bool | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None  # `input` already has its conversation
    background: OnlyFalse = None
    include_reasoning: OnlyTrue = None
    echo: OnlyFalse = None
    return_tokens_as_token_ids: OnlyFalse = None
    truncation: Annotated[Any, without_effect("disabled")] = None  # an input longer than the context is an error
    context_management: Annotated[Any, without_effect([], {})] = None
    client_metadata: RedundantField = None  # ids of the client's own
    n: Annotated[Any, accepts_only(1)] = None
    # known and not supported
    response_format: None = None
    prompt_logprobs: None = None
    return_token_ids: None = None
    n_predict: None = None
    conversation: None = None
    prompt: None = None
    moderation: None = None
    image: None = None
    access_programs: IgnoredField = None

    def grammar(self) -> GrammarSpec | None:
        shared, own = super().grammar(), _grammar_from_text_format(self.text)
        if shared and own:
            hint = "send text.format only"
            raise InvalidRequest("text.format and another output format are both set", param="text.format", hint=hint)
        return shared or own


@dataclass(frozen=True, slots=True)
class ResponsesCall(ChatCall):
    includes_encrypted_reasoning: bool = False
    store: bool | None = None  # whether to store the reply; None: if the server has a response store
    is_stored: bool = False  # the server stores the reply
    # (namespace, name) of the tools that are in a namespace, by the name that the model knows
    names_in_namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    echoed_fields: dict[str, Any] = field(default_factory=dict)  # fields that the reply repeats


def parse(body: bytes) -> ResponsesCall:
    try:
        request, ignored = decode_request(_add_item_types(body), ResponsesRequest)
    except InvalidRequest as error:
        raise _add_text_only_hint(error) from None
    request.returns_usage()
    functions = _list_functions(request)
    tools, choice = _convert_tools(request, functions)
    transcript = build_transcript(request.instructions, request.input)
    common = request.build_common_fields(extra_user_id=request.safety_identifier)
    effort = request.reasoning.effort if request.reasoning else None
    params = request.build_sampling_params(
        max_tokens=request.max_output_tokens, logprobs=_resolve_top_logprobs(request), prompt_logprobs=None
    )
    return ResponsesCall(
        common=common,
        messages=transcript.to_messages(param="input"),
        params=params,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        template_args=build_template_args(request.chat_template_kwargs, effort),
        template_settings=list_template_settings(request.chat_template_kwargs, effort, "reasoning.effort"),
        continues_last_message=continues_last_message(request.input),
        adds_generation_prompt=not continues_last_message(request.input),
        add_special_tokens=bool(request.add_special_tokens),
        bad_words=request.bad_words or (),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        keeps_first_tokens=request.truncation_side == "right",
        unset_params=request.list_unset_params(request.max_output_tokens),
        ignored=ignored.with_known(dict.fromkeys(transcript.ignored_fields)),
        stream=bool(request.stream),
        store=request.store,
        includes_encrypted_reasoning=INCLUDE_ENCRYPTED_REASONING in (request.include or ()),
        names_in_namespaces={
            function.joined_name: (function.namespace, function.tool.name)
            for function in functions
            if function.namespace is not None
        },
        echoed_fields={
            **_list_echoed_fields(request),
            "service_tier": "flex" if common.priority is Priority.BATCH else "default",
        },
    )


def _add_item_types(body: bytes) -> bytes:
    """Return the body with `type` added to input items that omit it; an invalid body is unchanged."""
    try:
        raw = msgspec.json.decode(body)
        items = raw.get("input") if isinstance(raw, dict) else None
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict):
                item.setdefault("type", "message" if "role" in item else "item_reference")
        return msgspec.json.encode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body


def _add_text_only_hint(error: InvalidRequest) -> InvalidRequest:
    needs_state = error.param == "conversation" or "'item_reference'" in error.message
    return (
        InvalidRequest(error.message, param=error.param, hint=_STATE_HINT) if needs_state else add_text_only_hint(error)
    )


def _grammar_from_text_format(text: TextConfig | None) -> GrammarSpec | None:
    match text and text.format:
        case JsonObjectFormat():
            return GrammarSpec("json_object")
        case SchemaFormat(schema=schema):
            return GrammarSpec("json_schema", encode_json_text(schema))
    return None


def _resolve_top_logprobs(request: ResponsesRequest) -> int | None:
    is_requested = INCLUDE_LOGPROBS in (request.include or ()) or request.top_logprobs
    return (request.top_logprobs or 0) if is_requested else None


@dataclass(frozen=True, slots=True)
class _Function:
    tool: FunctionFields
    namespace: str | None = None

    @property
    def joined_name(self) -> str:
        return join_tool_name(self.namespace, self.tool.name)


def _list_functions(request: ResponsesRequest) -> list[_Function]:
    functions: list[_Function] = []
    for each in request.tools or ():
        if isinstance(each, ToolNamespace):
            functions += [_Function(tool, each.name) for tool in each.tools]
        else:
            functions.append(_Function(each))
    return functions


def _convert_tools(request: ResponsesRequest, functions: list[_Function]) -> tuple[list[Tool], ToolChoice]:
    tools = [
        Tool(each.joined_name, each.tool.description or "", each.tool.parameters or {}, bool(each.tool.strict))
        for each in functions
    ]
    match request.tool_choice:
        case FunctionChoice(name=name):
            choice = ToolChoice("named", name)
        case AllowedChoice(mode=mode, tools=allowed):
            for ref in allowed:
                check_tools(tools, ToolChoice("named", ref.name))
            names = {ref.name for ref in allowed}
            tools, choice = [tool for tool in tools if tool.name in names], ToolChoice(mode)
        case str(mode):
            choice = ToolChoice(mode)
        case None:
            choice = ToolChoice("auto")
    check_tools(tools, choice)
    return tools, choice


def _list_echoed_fields(request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields that every reply repeats from its request."""
    text_format = request.text.format if request.text else None
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "text": {
            "format": {"type": "text"} if text_format is None else msgspec.to_builtins(text_format),
            "verbosity": "medium",
        },
        "tool_choice": msgspec.to_builtins(request.tool_choice) or "auto",
        "tools": [_render_tool(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "user": request.user,
    }


def _render_tool(tool: FunctionFields | ToolNamespace) -> dict[str, Any]:
    if isinstance(tool, ToolNamespace):
        inner = [_render_tool(each) for each in tool.tools]
        return {"type": "namespace", "name": tool.name, "description": tool.description or "", "tools": inner}
    details = {"description": tool.description, "parameters": tool.parameters, "strict": bool(tool.strict)}
    return {"type": "function", "name": tool.name, **details}
