"""Requests of POST /v1/chat/completions.

call = parse(body)
writer = chat_reply.make_writer(call, id, created, fingerprint)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from emberline.api.call import ChatCall
from emberline.api.openai.accepted_chat import ChatFields
from emberline.api.openai.generation_fields import build_generation_fields
from emberline.api.openai.messages import AssistantMessage, Content, Message, add_text_only_hint, to_template_messages
from emberline.api.openai.sampling import LogprobCount, UsageStreamOptions
from emberline.api.openai.template import (
    ThinkingOption,
    build_template_args,
    continues_last_message,
    list_template_settings,
    merge_template_kwargs,
)
from emberline.api.openai.tools import (
    FunctionChoice,
    Functions,
    ToolChoiceField,
    Tools,
    ToolSelection,
    select_functions,
    select_tools,
)
from emberline.api.parse import WireStruct, decode_request
from emberline.core.errors import InvalidRequest

__all__ = ["ChatRequest", "OpenAIChatCall", "parse"]

MetadataKey = Annotated[str, Meta(max_length=64)]
Metadata = Annotated[dict[MetadataKey, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


class PredictedContent(WireStruct):
    """The text that the client expects as the answer, for example the file that the model is to edit."""

    type: Literal["content"]
    content: Content

    def join_text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(ChatFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    stream_options: UsageStreamOptions | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: FunctionChoice | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    enable_thinking: bool | None = None  # a variable of the template
    thinking: ThinkingOption | None = None  # the form of DeepSeek and Z.ai for enable_thinking
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prediction: PredictedContent | None = None
    # vLLM's fields
    include_reasoning: bool | None = None
    echo: bool | None = None  # the reply begins with the last message if that is the assistant's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # known and not supported
    audio: None = None
    moderation: None = None
    chat_template: None = None


@dataclass(frozen=True, slots=True)
class OpenAIChatCall(ChatCall):
    includes_usage: bool = False
    uses_legacy_functions: bool = False
    shows_reasoning: bool = True
    echoed_text: str = ""  # text that the reply has before the generated text
    metadata: dict[str, str] = field(default_factory=dict)  # repeated in the reply


def parse(body: bytes) -> OpenAIChatCall:
    try:
        request, ignored = decode_request(body, ChatRequest)
    except InvalidRequest as error:
        raise add_text_only_hint(error) from None
    tools, max_tokens = _select_tools(request), _resolve_max_tokens(request)
    kwargs = merge_template_kwargs(request.chat_template_kwargs, request.enable_thinking, request.thinking)
    thinking_field = "enable_thinking" if request.enable_thinking is not None else "thinking"
    continue_last = continues_last_message(
        request.messages, request.continue_final_message, request.add_generation_prompt
    )
    return OpenAIChatCall(
        **build_generation_fields(request, request.stream_options, max_tokens, ignored),
        common=request.build_common_fields(extra_user_id=request.safety_identifier),
        messages=to_template_messages(request.messages),
        params=request.build_sampling_params(
            max_tokens=max_tokens, logprobs=_resolve_top_logprobs(request), prompt_logprobs=request.prompt_logprobs
        ),
        tools=tools.tools,
        tool_choice=tools.choice,
        parallel_tool_calls=tools.is_parallel,
        template_args=build_template_args(kwargs, request.reasoning_effort),
        template_settings=list_template_settings(
            kwargs,
            request.reasoning_effort,
            variables_from_other_field=(kwargs.keys() - (request.chat_template_kwargs or {}), thinking_field),
        ),
        continues_last_message=continue_last,
        adds_generation_prompt=request.add_generation_prompt is not False and not continue_last,
        add_special_tokens=bool(request.add_special_tokens),
        prediction=request.prediction.join_text() if request.prediction is not None else None,
        uses_legacy_functions=tools.is_legacy,
        shows_reasoning=request.include_reasoning is not False,
        echoed_text=_find_echoed_text(request),
        metadata=request.metadata or {},
    )


def _select_tools(request: ChatRequest) -> ToolSelection:
    if request.functions is None and request.function_call is None:
        return select_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    if request.tools is not None or request.tool_choice is not None or request.parallel_tool_calls:
        raise InvalidRequest("functions and tools are both set", param="functions", hint="send tools only")
    return select_functions(request.functions, request.function_call)


def _resolve_max_tokens(request: ChatRequest) -> int | None:
    limit = request.resolve_max_tokens(
        ("max_tokens", request.max_tokens), ("max_completion_tokens", request.max_completion_tokens)
    )
    if limit == 0:
        raise InvalidRequest("n_predict is 0; it must be 1 or more, or -1", param="n_predict", hint="send 1 or more")
    return limit


def _find_echoed_text(request: ChatRequest) -> str:
    if not request.echo or not isinstance(request.messages[-1], AssistantMessage):
        return ""
    return to_template_messages(request.messages[-1:])[0].get("content") or ""


def _resolve_top_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        what = f"top_logprobs is {request.top_logprobs}, but logprobs is not true"
        raise InvalidRequest(what, param="top_logprobs", hint="send logprobs: true too")
    return None
