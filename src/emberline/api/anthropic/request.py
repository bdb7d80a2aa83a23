"""Requests of POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol.

    call = parse(body)
    writer = reply.make_writer(call, id, created, fingerprint)

`cache_control` is accepted without effect: the full KV blocks of every prompt are cached anyway, and a later prompt
reuses its longest cached prefix. Blocks with `cache_control` do not stay longer: the least recently used blocks are
evicted first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from emberline.api.anthropic.content import Message, PlainTextBlock, ToolName, build_transcript
from emberline.api.call import ChatCall, CommonFields, Tool, ToolChoice
from emberline.api.fields import IgnoredField, IgnoredFields, RedundantField, keeps_types, without_effect
from emberline.api.openai.sampling import CHECKPOINT_DEFAULTS, ModelName
from emberline.api.parse import WireStruct, decode_request, encode_json_text
from emberline.api.template_settings import TemplateSetting
from emberline.api.tool_validation import check_tools
from emberline.core.errors import InvalidRequest, ThreadNotFound
from emberline.core.params import GrammarSpec, SamplingParams

__all__ = ["CountTokensRequest", "MessagesCall", "MessagesRequest", "parse", "parse_count_tokens", "render_token_count"]

MAX_TOKENS = (1 << 31) - 1
StopText = Annotated[str, Meta(max_length=1024)]  # an empty text has no effect
ThinkingDisplay = Annotated[str, Meta(max_length=32)]  # omitted: no thinking in the reply; else: all of it
Effort = Annotated[str, Meta(max_length=32)]
KEEPS_ALL_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

T = TypeVar("T", bound=msgspec.Struct)


class ToolDefinition(WireStruct):
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: RedundantField = None
    allowed_callers: Annotated[Any, without_effect(["direct"])] = None
    eager_input_streaming: bool | None = None  # no effect: arguments are always streamed as they are generated
    defer_loading: Annotated[Any, without_effect(False)] = None  # the prompt describes every tool
    input_examples: Annotated[Any, without_effect([])] = None


class AutoChoice(WireStruct, tag="auto", tag_field="type"):
    disable_parallel_tool_use: bool = False


class AnyChoice(WireStruct, tag="any", tag_field="type"):
    disable_parallel_tool_use: bool = False


class NamedChoice(WireStruct, tag="tool", tag_field="type"):
    name: ToolName
    disable_parallel_tool_use: bool = False


class NoneChoice(WireStruct, tag="none", tag_field="type"):
    disable_parallel_tool_use: ClassVar[bool] = False


class ThinkingEnabled(WireStruct, tag="enabled", tag_field="type"):
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    display: ThinkingDisplay | None = None


class ThinkingAdaptive(WireStruct, tag="adaptive", tag_field="type"):
    display: ThinkingDisplay | None = None


class ThinkingDisabled(WireStruct, tag="disabled", tag_field="type"):
    pass


class JsonFormat(WireStruct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(WireStruct):
    effort: Effort | None = None
    format: JsonFormat | None = None


class NewThread(WireStruct, tag="create", tag_field="type"):
    """Asks to store the conversation. Ignored: the request has all of its messages."""


class ContinuedThread(WireStruct, tag="continue", tag_field="type"):
    """Stands for the messages of an earlier request and its reply, which the server does not store."""

    previous_message_id: str


class Metadata(WireStruct):
    user_id: str | None = None


class CountTokensRequest(WireStruct):
    """The body of /v1/messages/count_tokens: the fields that determine the prompt."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: ModelName | None = None  # required only if the server has several models
    system: str | list[PlainTextBlock] | None = None
    tools: Annotated[list[ToolDefinition], keeps_types("custom")] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoneChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    cache_control: RedundantField = None
    output_format: JsonFormat | None = None  # the older name of output_config.format
    speed: IgnoredField = None
    betas: IgnoredField = None
    context_management: Annotated[Any, without_effect([], {}, {"edits": []}, KEEPS_ALL_THINKING)] = None
    mcp_servers: Annotated[Any, without_effect([])] = None
    compaction: None = None  # the reply would be a summary
    thread: NewThread | ContinuedThread | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None  # 0: greedy
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: IgnoredField = None  # the server has one tier
    cache_salt: str | None = None  # extension: requests with different salts never share cached blocks
    container: IgnoredField = None
    diagnostics: IgnoredField = None
    inference_geo: IgnoredField = None


@dataclass(frozen=True, slots=True)
class MessagesCall(ChatCall):
    shows_thinking: bool = True


def parse(body: bytes) -> MessagesCall:
    request, ignored = _decode(body, MessagesRequest)
    if isinstance(request.thinking, ThinkingEnabled) and request.thinking.budget_tokens >= request.max_tokens:
        budget, limit = request.thinking.budget_tokens, request.max_tokens
        raise InvalidRequest(
            f"thinking.budget_tokens is {budget}; it must be less than max_tokens, which is {limit}",
            param="thinking.budget_tokens",
            hint="raise max_tokens or lower the budget",
        )
    if isinstance(request.thread, ContinuedThread):
        id_ = request.thread.previous_message_id[:100]
        raise ThreadNotFound(
            f"thread.previous_message_id is {id_!r}, but this server does not store the messages of threads",
            param="thread",
            hint="send all messages without thread",
        )
    user = request.metadata.user_id if request.metadata else None
    return _build_call(
        request,
        ignored,
        CommonFields(request.model or "", cache_salt=request.cache_salt or "", user=user),
        _build_sampling_params(request),
        bool(request.stream),
    )


def parse_count_tokens(body: bytes) -> MessagesCall:
    request, ignored = _decode(body, CountTokensRequest)
    return _build_call(request, ignored, CommonFields(request.model or ""), SamplingParams(), stream=False)


def render_token_count(tokens: int) -> dict[str, Any]:
    return {"input_tokens": tokens}


def _decode(body: bytes, struct_type: type[T]) -> tuple[T, IgnoredFields]:
    try:
        return decode_request(body, struct_type)
    except InvalidRequest as error:
        if error.param and ".content[" in error.param and error.param.endswith("].type"):
            error.hint = "content blocks may be text, thinking, tool_use or tool_result: the models take text only"
        raise


def _build_call(
    request: CountTokensRequest, ignored: IgnoredFields, common: CommonFields, params: SamplingParams, stream: bool
) -> MessagesCall:
    tools = [Tool(t.name, t.description or "", t.input_schema, bool(t.strict)) for t in request.tools or ()]
    choice = _convert_tool_choice(request)
    check_tools(tools, choice)
    messages = build_transcript(request.system, request.messages).to_messages(param="messages")
    continues_last = messages[-1]["role"] == "assistant"
    return MessagesCall(
        common=common,
        messages=messages,
        params=params,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        template_args=_build_template_args(request),
        template_settings=_list_template_settings(request),
        thinking_budget=request.thinking.budget_tokens if isinstance(request.thinking, ThinkingEnabled) else None,
        continues_last_message=continues_last,
        adds_generation_prompt=not continues_last,
        unset_params=frozenset(name for name in CHECKPOINT_DEFAULTS if getattr(request, name, None) is None),
        ignored=ignored,
        stream=stream,
        shows_thinking=getattr(request.thinking, "display", None) != "omitted",
    )


def _build_sampling_params(request: MessagesRequest) -> SamplingParams:
    output_format = request.output_format
    if request.output_config and request.output_config.format:
        if output_format is not None:
            raise InvalidRequest(
                "output_format and output_config.format are both set",
                param="output_format",
                hint="send output_config.format only",
            )
        output_format = request.output_config.format
    temperature = 1.0 if request.temperature is None else request.temperature
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=0.0 if request.top_p == 0 else temperature,
        top_p=request.top_p or 1.0,
        top_k=request.top_k or 0,
        stop=tuple(filter(None, request.stop_sequences or ())),
        grammar=GrammarSpec("json_schema", encode_json_text(output_format.schema)) if output_format else None,
    )


def _convert_tool_choice(request: CountTokensRequest) -> ToolChoice:
    match request.tool_choice:
        case AnyChoice():
            return ToolChoice("required")
        case NamedChoice(name=name):
            return ToolChoice("named", name)
        case NoneChoice():
            return ToolChoice("none")
        case _:
            return ToolChoice("auto")


def _build_template_args(request: CountTokensRequest) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if request.thinking is not None:
        arguments["enable_thinking"] = not isinstance(request.thinking, ThinkingDisabled)
    if isinstance(request.thinking, ThinkingEnabled):
        arguments["thinking_budget"] = request.thinking.budget_tokens  # some templates put the budget into the prompt
    if request.output_config and request.output_config.effort:
        arguments["reasoning_effort"] = request.output_config.effort
    return arguments


def _list_template_settings(request: CountTokensRequest) -> list[TemplateSetting]:
    settings = []
    if request.thinking is not None:
        settings.append(
            TemplateSetting(
                "thinking", ("enable_thinking",), enables_reasoning=not isinstance(request.thinking, ThinkingDisabled)
            )
        )
    if request.output_config and request.output_config.effort:
        settings.append(TemplateSetting("output_config.effort", ("reasoning_effort",)))
    return settings
