"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol.

    call = parse(body)
    reply = stream.Renderer(call, id, created, fingerprint)

`cache_control` marks are accepted because they ask for what happens anyway: every prompt's full blocks are cached, and
a later prompt reuses its longest known beginning. A mark buys no lifetime: the least recently used blocks leave first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta

from emberline.api.anthropic.content import CacheControl, Message, OnlyText, ToolName, transcript
from emberline.api.call import Caller, ChatCall, Tool, ToolChoice
from emberline.api.fields import Empty, Hint, Off, ignored_fields, only
from emberline.api.openai.sampling import DEFAULTED, Name
from emberline.api.parse import Wire, decode, encode_text
from emberline.api.toolset import check_tools
from emberline.api.wishes import Wish
from emberline.core.errors import InvalidRequest
from emberline.core.params import Grammar, SamplingParams

__all__ = ["Call", "CountTokensRequest", "MessagesRequest", "parse", "parse_count", "token_count"]

MAX_TOKENS = (1 << 31) - 1
StopText = Annotated[str, Meta(max_length=1024)]  # empty: as if left out
Effort = Annotated[str, Meta(max_length=32)]

T = TypeVar("T")


class ToolDefinition(Wire):
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they come
    defer_loading: Off = None
    input_examples: Empty = None


class AutoChoice(Wire, tag="auto", tag_field="type"):
    disable_parallel_tool_use: bool = False


class AnyChoice(Wire, tag="any", tag_field="type"):
    disable_parallel_tool_use: bool = False


class NamedChoice(Wire, tag="tool", tag_field="type"):
    name: ToolName
    disable_parallel_tool_use: bool = False


class NoChoice(Wire, tag="none", tag_field="type"):
    disable_parallel_tool_use: ClassVar[bool] = False


class ThinkingEnabled(Wire, tag="enabled", tag_field="type"):
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Wire, tag="adaptive", tag_field="type"):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(Wire, tag="disabled", tag_field="type"):
    pass


class JsonFormat(Wire):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Wire):
    effort: Effort | None = None
    format: JsonFormat | None = None


class Metadata(Wire):
    user_id: str | None = None


class CountTokensRequest(Wire):
    """All that makes the prompt: what /v1/messages/count_tokens takes."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: Name | None = None  # needed only where several are served
    system: str | list[OnlyText] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    output_format: JsonFormat | None = None  # the older place of output_config.format
    speed: Hint = None
    betas: Hint = None
    context_management: Annotated[Any, only([], {}, {"edits": []})] = None
    mcp_servers: Empty = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None  # 0: greedy
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Hint = None  # there is one tier
    cache_salt: str | None = None  # ours: callers with different salts never share cached blocks
    container: None = None
    diagnostics: None = None
    inference_geo: None = None


@dataclass(frozen=True, slots=True)
class Call(ChatCall):
    show_thinking: bool = True


def parse(body: bytes) -> Call:
    asked = _decode(body, MessagesRequest)
    if isinstance(asked.thinking, ThinkingEnabled) and asked.thinking.budget_tokens >= asked.max_tokens:
        raise InvalidRequest("thinking.budget_tokens must be below max_tokens", param="thinking.budget_tokens")
    user = asked.metadata.user_id if asked.metadata else None
    return _call(
        asked, Caller(asked.model or "", salt=asked.cache_salt or "", user=user), _params(asked), bool(asked.stream)
    )


def parse_count(body: bytes) -> Call:
    asked = _decode(body, CountTokensRequest)
    return _call(asked, Caller(asked.model or ""), SamplingParams(), stream=False)


def token_count(tokens: int) -> dict[str, Any]:
    return {"input_tokens": tokens}


def _decode(body: bytes, into: type[T]) -> T:
    try:
        return decode(body, into)
    except InvalidRequest as error:
        if error.param and ".content[" in error.param and error.param.endswith("].type"):
            error.hint = "text, thinking, tool_use and tool_result are served: the models read text only"
        raise


def _call(asked: CountTokensRequest, caller: Caller, params: SamplingParams, stream: bool) -> Call:
    ignored = ignored_fields(asked)
    tools = [Tool(t.name, t.description or "", t.input_schema, bool(t.strict)) for t in asked.tools or ()]
    choice = _tool_choice(asked)
    check_tools(tools, choice)
    messages = transcript(asked.system, asked.messages).messages(param="messages")
    continued = messages[-1]["role"] == "assistant"
    return Call(
        caller=caller,
        messages=messages,
        params=params,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (asked.tool_choice and asked.tool_choice.disable_parallel_tool_use),
        template_args=_template_args(asked),
        wishes=_wishes(asked),
        thinking_budget=asked.thinking.budget_tokens if isinstance(asked.thinking, ThinkingEnabled) else None,
        continue_last=continued,
        generation_prompt=not continued,
        unset=frozenset(name for name in DEFAULTED if getattr(asked, name, None) is None),
        ignored=ignored,
        stream=stream,
        show_thinking=getattr(asked.thinking, "display", None) != "omitted",
    )


def _params(asked: MessagesRequest) -> SamplingParams:
    form = asked.output_format
    if asked.output_config and asked.output_config.format:
        if form is not None:
            raise InvalidRequest("output_format and output_config.format exclude each other", param="output_format")
        form = asked.output_config.format
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=0.0 if asked.top_p == 0 else temperature,
        top_p=asked.top_p or 1.0,
        top_k=asked.top_k or 0,
        stop=tuple(filter(None, asked.stop_sequences or ())),
        grammar=Grammar("json_schema", encode_text(form.schema)) if form else None,
    )


def _tool_choice(asked: CountTokensRequest) -> ToolChoice:
    match asked.tool_choice:
        case AnyChoice():
            return ToolChoice("required")
        case NamedChoice(name=name):
            return ToolChoice("named", name)
        case NoChoice():
            return ToolChoice("none")
        case _:
            return ToolChoice("auto")


def _template_args(asked: CountTokensRequest) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if asked.thinking is not None:
        arguments["enable_thinking"] = not isinstance(asked.thinking, ThinkingDisabled)
    if isinstance(asked.thinking, ThinkingEnabled):
        arguments["thinking_budget"] = asked.thinking.budget_tokens  # for templates that tell the model
    if asked.output_config and asked.output_config.effort:
        arguments["reasoning_effort"] = asked.output_config.effort
    return arguments


def _wishes(asked: CountTokensRequest) -> list[Wish]:
    wishes = []
    if asked.thinking is not None:
        wishes.append(Wish("thinking", ("enable_thinking",), thinks=not isinstance(asked.thinking, ThinkingDisabled)))
    if asked.output_config and asked.output_config.effort:
        wishes.append(Wish("output_config.effort", ("reasoning_effort",)))
    return wishes
