"""The messages of a chat request, and the same as chat templates take them: content as text, arguments as objects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from emberline.api.parse import Wire, decode_object
from emberline.core.errors import InvalidRequest

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]

_PART_TYPE = re.compile(r"\.content\[\d+\]\.type$")


# What clients give back with a message that says nothing new: copies of what stands in its text or its arguments, marks
# of a cache that works without, and names that a reply had. It is read by no template, and so not listed as ignored.
Redundant = Any


class TextPart(Wire):
    type: Literal["text"]  # not a tag: alone in its list, a tag could be left out
    text: str
    cache_control: Redundant = None


class AssistantTextPart(Wire, tag_field="type", tag="text"):
    text: str
    cache_control: Redundant = None
    annotations: Redundant = None


class RefusalPart(Wire, tag_field="type", tag="refusal"):
    refusal: str


Content = str | Annotated[list[TextPart], Meta(min_length=1)]
AssistantContent = str | list[AssistantTextPart | RefusalPart]


class CalledFunction(Wire):
    name: FunctionName
    arguments: str | dict[str, Any] | None = None  # JSON text; some clients send the object
    parsed_arguments: Redundant = None  # of the openai package's stream helper
    provider_specific_fields: Redundant = None


class MessageToolCall(Wire):
    id: Annotated[str, Meta(min_length=1)]
    function: CalledFunction
    type: Literal["function"] = "function"
    index: Redundant = None
    cache_control: Redundant = None
    provider_specific_fields: Redundant = None
    extra_content: Redundant = None


class SystemMessage(Wire, tag_field="role", tag="system"):
    content: Content
    name: str | None = None
    cache_control: Redundant = None
    id: Redundant = None


class DeveloperMessage(Wire, tag_field="role", tag="developer"):
    content: Content
    name: str | None = None
    cache_control: Redundant = None
    id: Redundant = None


class UserMessage(Wire, tag_field="role", tag="user"):
    content: Content
    name: str | None = None
    cache_control: Redundant = None
    id: Redundant = None


class AssistantMessage(Wire, tag_field="role", tag="assistant"):
    content: AssistantContent | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as newer vLLM and OpenRouter name it
    tool_calls: list[MessageToolCall] | None = None
    function_call: CalledFunction | None = None
    audio: None = None
    annotations: Redundant = None  # what an answer cited is in its text, as far as a model reads it
    parsed: Redundant = None  # of the openai package's parse helper
    cache_control: Redundant = None
    id: Redundant = None
    reasoning_details: Redundant = None  # OpenRouter's; its text is in `reasoning`
    thinking_blocks: Redundant = None  # LiteLLM's; its text is in `reasoning_content`
    provider_specific_fields: Redundant = None


class ToolMessage(Wire, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: Annotated[str, Meta(min_length=1)]
    name: str | None = None
    cache_control: Redundant = None
    id: Redundant = None


class FunctionMessage(Wire, tag_field="role", tag="function"):
    content: str
    name: FunctionName


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


def for_template(messages: list[Message]) -> list[dict[str, Any]]:
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def explain_parts(error: InvalidRequest) -> InvalidRequest:
    """The most common refusal deserves its reason."""
    if error.param and _PART_TYPE.search(error.param):
        return InvalidRequest(error.message, param=error.param, hint="the models served here take text parts only")
    return error


def _message(message: Message, param: str) -> dict[str, Any]:
    match message:
        case AssistantMessage():
            return _assistant(message, param)
        case ToolMessage():
            made = {"role": "tool", "content": _text(message.content), "tool_call_id": message.tool_call_id}
        case FunctionMessage():
            made = {"role": "tool", "content": message.content, "tool_call_id": _legacy_id(message.name)}
        case UserMessage():
            made = {"role": "user", "content": _text(message.content)}
        case SystemMessage() | DeveloperMessage():  # one meaning, and templates know the first name
            made = {"role": "system", "content": _text(message.content)}
    return made if message.name is None else {**made, "name": message.name}


def _assistant(message: AssistantMessage, param: str) -> dict[str, Any]:
    if message.content and message.refusal:
        raise InvalidRequest(f"{param} has both content and refusal", param=f"{param}.refusal", hint="give one of them")
    text = _text(message.content or message.refusal or "")
    calls = [
        _call(call.id, call.function, f"{param}.tool_calls[{at}].function")
        for at, call in enumerate(message.tool_calls or [])
    ]
    if (legacy := message.function_call) is not None:
        calls.append(_call(_legacy_id(legacy.name), legacy, f"{param}.function_call"))
    thoughts = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if message.content is None and not (text or calls or thoughts):
        raise InvalidRequest(f"{param} says nothing", param=f"{param}.content", hint="give it content or tool_calls")
    made: dict[str, Any] = {"role": "assistant", "content": text}
    if message.name is not None:
        made["name"] = message.name
    if thoughts is not None:
        made["reasoning_content"] = thoughts
    if calls:
        made["tool_calls"] = calls
    return made


def _call(id: str, function: CalledFunction, param: str) -> dict[str, Any]:
    # A call without arguments is often written as the empty text.
    arguments = function.arguments or {}
    if isinstance(arguments, str):
        arguments = decode_object(arguments, f"{param}.arguments") if arguments.strip() else {}
    return {"id": id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _legacy_id(name: str) -> str:
    """Functions of the older protocol have no ids; templates want the call and its answer to share one."""
    return f"call_{name}"


def _text(content: str | Sequence[TextPart | AssistantTextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
