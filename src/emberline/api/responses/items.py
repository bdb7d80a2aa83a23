"""The items a Responses request is made of, and the conversation they tell.

What a reply's item carries beside its content (ids, statuses, logprobs) is accepted, so that items can be given back as
they came.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from emberline.api.openai.messages import FunctionName
from emberline.api.parse import Wire, decode_object
from emberline.api.transcript import Transcript
from emberline.core.errors import InvalidRequest

Status = Literal["in_progress", "completed", "incomplete"]
CallId = Annotated[str, Meta(min_length=1)]


class InputText(Wire, tag_field="type", tag="input_text"):
    text: str


class ResultText(Wire):
    """The same where there are no other parts: a tag could be left out there."""

    type: Literal["input_text"]
    text: str


class OutputText(Wire, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] | None = None  # what an answer cited is in its text, as far as a model reads it
    logprobs: list[dict[str, Any]] | None = None


class RefusalText(Wire, tag_field="type", tag="refusal"):
    refusal: str


class SummaryText(Wire):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Wire):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(Wire, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | RefusalText]
    id: str | None = None
    status: Status | None = None  # a last message of the assistant's that is not completed is continued
    phase: None = None


class ReasoningItem(Wire, tag_field="type", tag="reasoning"):
    id: str | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class FunctionCallItem(Wire, tag_field="type", tag="function_call"):
    call_id: CallId
    name: FunctionName
    arguments: str  # JSON text
    id: str | None = None
    status: Status | None = None
    namespace: None = None
    caller: None = None
    asynchronous: None = field(name="async", default=None)


class FunctionCallOutputItem(Wire, tag_field="type", tag="function_call_output"):
    call_id: CallId
    output: str | list[ResultText]
    id: str | None = None
    status: Status | None = None
    name: None = None
    namespace: None = None
    caller: None = None


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem


def transcript(instructions: str | None, input: str | list[Item]) -> Transcript:
    made = Transcript()
    if instructions is not None:
        made.say("system", instructions)
    items: list[Item] = [MessageItem(role="user", content=input)] if isinstance(input, str) else input
    for at, item in enumerate(items):
        _add(made, item, f"input[{at}]")
    return made


def unfinished(input: str | list[Item]) -> bool:
    """Whether the assistant's last message is to be continued."""
    last = input[-1] if input else None
    return isinstance(last, MessageItem) and last.role == "assistant" and last.status in ("in_progress", "incomplete")


def seal(reasoning: str) -> str:
    """Reasoning as opaque text, for clients that give back no content. It hides nothing: the content is in clear."""
    return base64.b64encode(reasoning.encode()).decode()


def _add(made: Transcript, item: Item, path: str) -> None:
    match item:
        case MessageItem(role="developer"):  # templates know it by the older name
            made.say("system", _text(item.content))
        case MessageItem(role="user" | "assistant" | "system" as role):
            made.say(role, _text(item.content))
        case ReasoningItem():
            if text := _reasoning(item, path):
                made.think(text)
        case FunctionCallItem():
            arguments = decode_object(item.arguments, f"{path}.arguments") if item.arguments.strip() else {}
            made.call(item.call_id, item.name, arguments)
        case FunctionCallOutputItem():
            made.answer(item.call_id, _text(item.output), param=f"{path}.call_id")


def _reasoning(item: ReasoningItem, path: str) -> str:
    if item.content:
        return "\n".join(part.text for part in item.content)
    if item.encrypted_content:
        return _unseal(item.encrypted_content, f"{path}.encrypted_content")
    return "\n".join(part.text for part in item.summary or ())


def _unseal(sealed: str, param: str) -> str:
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except ValueError:  # what is not base64, not ASCII, or not UTF-8 inside
        hint = "give the item back as it came, or leave it out"
        raise InvalidRequest(f"{param} is not ours", param=param, hint=hint) from None


def _text(content: str | list[ResultText] | list[InputText | OutputText | RefusalText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalText) else part.text for part in content)
