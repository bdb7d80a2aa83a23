"""POST /v1/responses. The conversation comes whole, as `input`: the server adds that of previous_response_id.

call = parse(body)
reply = stream.Renderer(call, id, created, fingerprint)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.call import ChatCall, Tool, ToolChoice
from emberline.api.fields import Empty, Hint, Off, ignored_fields, only
from emberline.api.openai.accepted import On
from emberline.api.openai.accepted_chat import ChatFields
from emberline.api.openai.grammar import JsonObjectFormat, TextFormat
from emberline.api.openai.messages import FunctionName, explain_parts
from emberline.api.openai.sampling import LogprobCount, StreamOptions
from emberline.api.openai.template import template_args, wishes
from emberline.api.parse import Wire, decode, encode_text
from emberline.api.responses.items import Item, transcript, unfinished
from emberline.api.toolset import check_tools
from emberline.core.errors import InvalidRequest
from emberline.core.params import Grammar
from emberline.core.request import Priority

__all__ = ["Call", "ResponsesRequest", "parse"]

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
MetadataKey = Annotated[str, Meta(max_length=64)]
Metadata = Annotated[dict[MetadataKey, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
Limit = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]

_STATELESS = "send the whole conversation as input, or continue a response by previous_response_id"

# What can be asked for beside the answer. All but two are about built-in tools, of which no reply has any.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponseTool(Wire):
    type: Literal["function"]
    name: FunctionName
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Off = None
    output_schema: None = None


class FunctionChoice(Wire, tag_field="type", tag="function"):
    name: FunctionName


class AllowedTool(Wire):
    type: Literal["function"]
    name: FunctionName


class AllowedChoice(Wire, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class SchemaFormat(Wire, tag_field="type", tag="json_schema"):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None  # the output always matches, strict or not


class TextConfig(Wire):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Hint = None


class ReasoningConfig(Wire):
    effort: Annotated[str, Meta(max_length=32)] | None = None
    summary: Annotated[Any, only("auto", "concise", "detailed")] = None  # the reasoning is shown whole
    context: Hint = None
    mode: Hint = None
    generate_summary: Hint = None  # the older name of `summary`


class ResponseStreamOptions(StreamOptions):
    include_usage: None = None  # the last event always has it


class ResponsesRequest(ChatFields, kw_only=True):
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    max_tool_calls: Limit | None = None  # of built-in tools: there are none
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Included] | None = None
    top_logprobs: LogprobCount | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    store: bool | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None  # its conversation is in `input` by now
    background: Off = None
    include_reasoning: On = None
    echo: Off = None
    return_tokens_as_token_ids: Off = None
    truncation: Annotated[Any, only("disabled")] = None
    context_management: Empty = None
    # known and not served
    n: None = None
    response_format: None = None
    prompt_logprobs: None = None
    return_token_ids: None = None
    n_predict: None = None
    conversation: None = None
    prompt: None = None
    moderation: None = None
    image: None = None
    access_programs: None = None

    def grammar(self) -> Grammar | None:
        theirs, ours = super().grammar(), _of_format(self.text)
        if theirs and ours:
            raise InvalidRequest("text.format excludes other ways to ask for a format", param="text.format")
        return theirs or ours


@dataclass(frozen=True, slots=True)
class Call(ChatCall):
    seal_reasoning: bool = False
    store: bool | None = None  # whether the reply is to be kept; None: where there is a place for it
    kept: bool = False  # it is
    echo: dict[str, Any] = field(default_factory=dict)  # what the reply repeats of the request


def parse(body: bytes) -> Call:
    try:
        asked = decode(_typed(body), ResponsesRequest)
    except InvalidRequest as error:
        raise _explain(error) from None
    ignored = ignored_fields(asked)
    asked.include_usage()
    tools, choice = _tools(asked)
    caller = asked.caller(user=asked.safety_identifier)
    effort = asked.reasoning.effort if asked.reasoning else None
    params = asked.params(max_tokens=asked.max_output_tokens, logprobs=_logprobs(asked), prompt_logprobs=None)
    return Call(
        caller=caller,
        messages=transcript(asked.instructions, asked.input).messages(param="input"),
        params=params,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        template_args=template_args(asked.chat_template_kwargs, effort),
        wishes=wishes(asked.chat_template_kwargs, effort, "reasoning.effort"),
        continue_last=unfinished(asked.input),
        generation_prompt=not unfinished(asked.input),
        add_special_tokens=bool(asked.add_special_tokens),
        bad_words=asked.bad_words or (),
        truncate=asked.truncate_prompt_tokens,
        keep_first=asked.truncation_side == "right",
        unset=asked.unset(asked.max_output_tokens),
        ignored=ignored,
        stream=bool(asked.stream),
        store=asked.store,
        seal_reasoning=SEALED_REASONING in (asked.include or ()),
        echo={
            **_echo(asked),
            "service_tier": "flex" if caller.priority is Priority.BATCH else "default",
        },
    )


def _typed(body: bytes) -> bytes:
    """The protocol lets messages go without their type, our structs do not. `decode` refuses a faulty body."""
    try:
        raw = msgspec.json.decode(body)
        items = raw.get("input") if isinstance(raw, dict) else None
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict):
                item.setdefault("type", "message" if "role" in item else "item_reference")
        return msgspec.json.encode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body


def _explain(error: InvalidRequest) -> InvalidRequest:
    stateful = error.param == "conversation" or "'item_reference'" in error.message
    return InvalidRequest(error.message, param=error.param, hint=_STATELESS) if stateful else explain_parts(error)


def _of_format(text: TextConfig | None) -> Grammar | None:
    match text and text.format:
        case JsonObjectFormat():
            return Grammar("json_object")
        case SchemaFormat(schema=schema):
            return Grammar("json_schema", encode_text(schema))
    return None


def _logprobs(asked: ResponsesRequest) -> int | None:
    wanted = LOGPROBS in (asked.include or ()) or asked.top_logprobs
    return (asked.top_logprobs or 0) if wanted else None


def _tools(asked: ResponsesRequest) -> tuple[list[Tool], ToolChoice]:
    tools = [Tool(t.name, t.description or "", t.parameters or {}, bool(t.strict)) for t in asked.tools or ()]
    match asked.tool_choice:
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


def _echo(asked: ResponsesRequest) -> dict[str, Any]:
    """What every reply repeats of its request."""
    form = asked.text.format if asked.text else None
    return {
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "text": {"format": {"type": "text"} if form is None else msgspec.to_builtins(form), "verbosity": "medium"},
        "tool_choice": msgspec.to_builtins(asked.tool_choice) or "auto",
        "tools": [_shown(tool) for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "truncation": "disabled",
        "user": asked.user,
    }


def _shown(tool: ResponseTool) -> dict[str, Any]:
    about = {"description": tool.description, "parameters": tool.parameters, "strict": bool(tool.strict)}
    return {"type": "function", "name": tool.name, **about}
