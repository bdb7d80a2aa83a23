"""The input items of a Responses request, and their conversion to messages for chat templates.

Reply items have fields besides their content (ids, statuses, logprobs). These fields are also accepted in the input, so
that a client can send the items of a reply back unchanged.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from emberline.api.fields import IgnoredField, OnlyFalse, RedundantField
from emberline.api.openai.messages import FunctionName
from emberline.api.parse import WireStruct, decode_json_object
from emberline.api.transcript import Transcript
from emberline.wire.tool_names import join_tool_name

Status = Literal["in_progress", "completed", "incomplete"]
CallId = Annotated[str, Meta(min_length=1)]


class InputText(WireStruct, tag_field="type", tag="input_text"):
    text: str


class ToolOutputText(WireStruct):
    """A text part of a tool's output.

    `type` is a normal field, not a msgspec tag: msgspec requires tags only in unions, and this struct is not in one.
    """

    type: Literal["input_text"]
    text: str


class OutputText(WireStruct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] | None = None  # not passed to the model, which reads the text only
    logprobs: list[dict[str, Any]] | None = None


class RefusalText(WireStruct, tag_field="type", tag="refusal"):
    refusal: str


class SummaryText(WireStruct):
    type: Literal["summary_text"]
    text: str


class ReasoningText(WireStruct):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(WireStruct, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | RefusalText]
    id: str | None = None
    status: Status | None = None  # the output continues a last assistant message that is not completed
    phase: IgnoredField = None


class ReasoningItem(WireStruct, tag_field="type", tag="reasoning"):
    id: str | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class FunctionCallItem(WireStruct, tag_field="type", tag="function_call"):
    call_id: CallId
    name: FunctionName
    arguments: str  # JSON text
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None
    caller: IgnoredField = None
    asynchronous: OnlyFalse = field(name="async", default=None)


class FunctionCallOutputItem(WireStruct, tag_field="type", tag="function_call_output"):
    call_id: CallId
    output: str | list[ToolOutputText]
    id: str | None = None
    status: Status | None = None
    name: RedundantField = None  # the call has it too
    namespace: RedundantField = None
    caller: IgnoredField = None


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem

# Items that are about tools which a different provider hosts. The messages around them have the answers.
HOSTED_ITEMS = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "computer_call",
    "computer_call_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "tool_search_call",
    "tool_search_output",
)


def build_transcript(instructions: str | None, input: str | list[Item]) -> Transcript:
    result = Transcript()
    if instructions is not None:
        result.add_text("system", instructions)
    items: list[Item] = [MessageItem(role="user", content=input)] if isinstance(input, str) else input
    for i, item in enumerate(items):
        _add_item(result, item, f"input[{i}]")
    return result


def continues_last_message(input: str | list[Item]) -> bool:
    """Return whether the last item is an incomplete assistant message, which the output then continues."""
    last = input[-1] if input else None
    return isinstance(last, MessageItem) and last.role == "assistant" and last.status in ("in_progress", "incomplete")


def encode_reasoning(reasoning: str) -> str:
    """Return the reasoning in the form that clients send back as encrypted_content.

    The text is only encoded, not encrypted.
    """
    return base64.b64encode(reasoning.encode()).decode()


def _add_item(transcript: Transcript, item: Item, path: str) -> None:
    match item:
        case MessageItem(role="developer"):  # templates use the older name
            transcript.add_text("system", _join_texts(item.content))
        case MessageItem(role="user" | "assistant" | "system" as role):
            transcript.add_text(role, _join_texts(item.content))
        case ReasoningItem():
            if text := _read_reasoning_text(item, transcript.ignored_fields):
                transcript.add_reasoning(text)
        case FunctionCallItem():
            arguments = decode_json_object(item.arguments, f"{path}.arguments") if item.arguments.strip() else {}
            transcript.add_tool_call(item.call_id, join_tool_name(item.namespace, item.name), arguments)
        case FunctionCallOutputItem():
            transcript.add_tool_result(item.call_id, _join_texts(item.output), param=f"{path}.call_id")


def _read_reasoning_text(item: ReasoningItem, ignored_fields: list[str]) -> str:
    if item.content:
        return "\n".join(part.text for part in item.content)
    if item.encrypted_content:
        try:
            return base64.b64decode(item.encrypted_content, validate=True).decode()
        except ValueError:  # not base64, not ASCII, or not UTF-8 inside: a different server encrypted it
            ignored_fields.append("input[].encrypted_content")
    return "\n".join(part.text for part in item.summary or ())


def _join_texts(content: str | list[ToolOutputText] | list[InputText | OutputText | RefusalText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalText) else part.text for part in content)
