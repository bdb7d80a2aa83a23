"""The messages of a chat request, and their conversion to the form that chat templates take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from emberline.api.fields import RedundantField
from emberline.api.parse import WireStruct, decode_json_object
from emberline.core.errors import InvalidRequest

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]

_PART_TYPE = re.compile(r"\.content\[\d+\]\.type$")


class TextPart(WireStruct):
    type: Literal["text"]  # not a tag: msgspec would let a lone struct omit its tag
    text: str
    cache_control: RedundantField = None


class AssistantTextPart(WireStruct, tag_field="type", tag="text"):
    text: str
    cache_control: RedundantField = None
    annotations: RedundantField = None


class RefusalPart(WireStruct, tag_field="type", tag="refusal"):
    refusal: str


Content = str | Annotated[list[TextPart], Meta(min_length=1)]
AssistantContent = str | list[AssistantTextPart | RefusalPart]


class CalledFunction(WireStruct):
    name: FunctionName
    arguments: str | dict[str, Any] | None = None  # JSON text; some clients send an object
    parsed_arguments: RedundantField = None  # added by the stream helper of the openai package
    provider_specific_fields: RedundantField = None


class MessageToolCall(WireStruct):
    id: Annotated[str, Meta(min_length=1)]
    function: CalledFunction
    type: Literal["function"] = "function"
    index: RedundantField = None
    cache_control: RedundantField = None
    provider_specific_fields: RedundantField = None
    extra_content: RedundantField = None


class SystemMessage(WireStruct, tag_field="role", tag="system"):
    content: Content
    name: str | None = None
    cache_control: RedundantField = None
    id: RedundantField = None


class DeveloperMessage(WireStruct, tag_field="role", tag="developer"):
    content: Content
    name: str | None = None
    cache_control: RedundantField = None
    id: RedundantField = None


class UserMessage(WireStruct, tag_field="role", tag="user"):
    content: Content
    name: str | None = None
    cache_control: RedundantField = None
    id: RedundantField = None


class AssistantMessage(WireStruct, tag_field="role", tag="assistant"):
    content: AssistantContent | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # name of reasoning_content in newer vLLM and OpenRouter
    tool_calls: list[MessageToolCall] | None = None
    function_call: CalledFunction | None = None
    audio: None = None
    annotations: RedundantField = None  # citations; the model reads the text only
    parsed: RedundantField = None  # added by the parse helper of the openai package
    cache_control: RedundantField = None
    id: RedundantField = None
    reasoning_details: RedundantField = None  # OpenRouter's; its text is in `reasoning`
    thinking_blocks: RedundantField = None  # LiteLLM's; its text is in `reasoning_content`
    provider_specific_fields: RedundantField = None


class ToolMessage(WireStruct, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: Annotated[str, Meta(min_length=1)]
    name: str | None = None
    cache_control: RedundantField = None
    id: RedundantField = None


class FunctionMessage(WireStruct, tag_field="role", tag="function"):
    content: str
    name: FunctionName


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


def to_template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    return [_convert_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def add_text_only_hint(error: InvalidRequest) -> InvalidRequest:
    """Return the error, with the hint "text parts only" if it is about an image or other non-text part."""
    if error.param and _PART_TYPE.search(error.param):
        return InvalidRequest(error.message, param=error.param, hint="the models of this server take text parts only")
    return error


def _convert_message(message: Message, param: str) -> dict[str, Any]:
    match message:
        case AssistantMessage():
            return _convert_assistant(message, param)
        case ToolMessage():
            result = {
                "role": "tool",
                "content": _join_text_parts(message.content),
                "tool_call_id": message.tool_call_id,
            }
        case FunctionMessage():
            result = {"role": "tool", "content": message.content, "tool_call_id": _make_function_call_id(message.name)}
        case UserMessage():
            result = {"role": "user", "content": _join_text_parts(message.content)}
        case SystemMessage() | DeveloperMessage():  # templates use the older name for both
            result = {"role": "system", "content": _join_text_parts(message.content)}
    return result if message.name is None else {**result, "name": message.name}


def _convert_assistant(message: AssistantMessage, param: str) -> dict[str, Any]:
    if message.content and message.refusal:
        raise InvalidRequest(f"{param} has both content and refusal", param=f"{param}.refusal", hint="send one of them")
    text = _join_text_parts(message.content or message.refusal or "")
    calls = [
        _convert_tool_call(call.id, call.function, f"{param}.tool_calls[{i}].function")
        for i, call in enumerate(message.tool_calls or [])
    ]
    if (legacy := message.function_call) is not None:
        calls.append(_convert_tool_call(_make_function_call_id(legacy.name), legacy, f"{param}.function_call"))
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if message.content is None and not (text or calls or reasoning):
        raise InvalidRequest(f"{param} is empty", param=f"{param}.content", hint="send content or tool_calls")
    result: dict[str, Any] = {"role": "assistant", "content": text}
    if message.name is not None:
        result["name"] = message.name
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if calls:
        result["tool_calls"] = calls
    return result


def _convert_tool_call(id: str, function: CalledFunction, param: str) -> dict[str, Any]:
    # Clients often send an empty text for a call without arguments.
    arguments = function.arguments or {}
    if isinstance(arguments, str):
        arguments = decode_json_object(arguments, f"{param}.arguments") if arguments.strip() else {}
    return {"id": id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _make_function_call_id(name: str) -> str:
    """Return an id for a call in the older `functions` format, which has no ids; chat templates need one."""
    return f"call_{name}"


def _join_text_parts(content: str | Sequence[TextPart | AssistantTextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
