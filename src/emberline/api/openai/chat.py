"""POST /v1/chat/completions.

call = parse(body)                                  a Call is a ChatCall and what only this protocol's replies need
reply = chat_stream.Renderer(call, id, created, fingerprint)    for a stream and for a plain reply alike
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from emberline.api.call import ChatCall
from emberline.api.fields import ignored_fields
from emberline.api.openai.accepted_chat import ChatFields
from emberline.api.openai.messages import AssistantMessage, Message, explain_parts, for_template
from emberline.api.openai.sampling import LogprobCount, RunningStreamOptions
from emberline.api.openai.template import Thinking, continues_last, template_args, template_kwargs, wishes
from emberline.api.openai.tools import Choice, FunctionChoice, Functions, Toolbox, Tools, legacy_toolbox, toolbox
from emberline.api.parse import decode
from emberline.core.errors import InvalidRequest

__all__ = ["Call", "ChatRequest", "parse"]

MetadataKey = Annotated[str, Meta(max_length=64)]
Metadata = Annotated[dict[MetadataKey, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


class ChatRequest(ChatFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    stream_options: RunningStreamOptions | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: FunctionChoice | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    enable_thinking: bool | None = None  # as a variable of the template
    thinking: Thinking | None = None  # the same, as DeepSeek and Z.ai name it
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    # vLLM's
    include_reasoning: bool | None = None
    echo: bool | None = None  # the reply begins with the last message, if that is the assistant's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # known and not served
    audio: None = None
    web_search_options: None = None
    moderation: None = None
    chat_template: None = None


@dataclass(frozen=True, slots=True)
class Call(ChatCall):
    include_usage: bool = False
    legacy_functions: bool = False
    show_reasoning: bool = True
    echo: str = ""  # text before what is generated
    metadata: dict[str, str] = field(default_factory=dict)  # echoed


def parse(body: bytes) -> Call:
    try:
        asked = decode(body, ChatRequest)
    except InvalidRequest as error:
        raise explain_parts(error) from None
    ignored = ignored_fields(asked) + (asked.stream_options.ignored() if asked.stream_options else [])
    tools, max_tokens = _tools(asked), _max_tokens(asked)
    kwargs = template_kwargs(asked.chat_template_kwargs, asked.enable_thinking, asked.thinking)
    field = "enable_thinking" if asked.enable_thinking is not None else "thinking"
    if asked.prompt_logprobs is not None and asked.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs", hint="send stream: false")
    continue_last = continues_last(asked.messages, asked.continue_final_message, asked.add_generation_prompt)
    return Call(
        caller=asked.caller(user=asked.safety_identifier),
        messages=for_template(asked.messages),
        params=asked.params(max_tokens=max_tokens, logprobs=_logprobs(asked), prompt_logprobs=asked.prompt_logprobs),
        tools=tools.tools,
        tool_choice=tools.choice,
        parallel_tool_calls=tools.parallel,
        template_args=template_args(kwargs, asked.reasoning_effort),
        wishes=wishes(kwargs, asked.reasoning_effort, own=(kwargs.keys() - (asked.chat_template_kwargs or {}), field)),
        continue_last=continue_last,
        generation_prompt=asked.add_generation_prompt is not False and not continue_last,
        add_special_tokens=bool(asked.add_special_tokens),
        bad_words=asked.bad_words or (),
        truncate=asked.truncate_prompt_tokens,
        keep_first=asked.truncation_side == "right",
        return_token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        unset=asked.unset(max_tokens),
        ignored=ignored,
        stream=bool(asked.stream),
        include_usage=asked.include_usage(),
        running_usage=asked.stream_options is not None and asked.stream_options.running(),
        legacy_functions=tools.legacy,
        show_reasoning=asked.include_reasoning is not False,
        echo=_echo(asked),
        metadata=asked.metadata or {},
    )


def _tools(asked: ChatRequest) -> Toolbox:
    if asked.functions is None and asked.function_call is None:
        return toolbox(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    if asked.tools is not None or asked.tool_choice is not None or asked.parallel_tool_calls:
        raise InvalidRequest("functions and tools exclude each other", param="functions", hint="use tools")
    return legacy_toolbox(asked.functions, asked.function_call)


def _max_tokens(asked: ChatRequest) -> int | None:
    limit = asked.limit(("max_tokens", asked.max_tokens), ("max_completion_tokens", asked.max_completion_tokens))
    if limit == 0:
        raise InvalidRequest("n_predict is 0, which asks for no answer", param="n_predict", hint="send 1 or more")
    return limit


def _echo(asked: ChatRequest) -> str:
    if not asked.echo or not isinstance(asked.messages[-1], AssistantMessage):
        return ""
    return for_template(asked.messages[-1:])[0].get("content") or ""


def _logprobs(asked: ChatRequest) -> int | None:
    if asked.logprobs:
        return asked.top_logprobs or 0
    if asked.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs", hint="send logprobs: true with it")
    return None
