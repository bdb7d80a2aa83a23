"""Finds out in which form a chat template takes the tool calls of earlier messages.

Most templates take the arguments of a call as an object. Some insert the arguments into a text, so they must be a
string with JSON. Some render the calls of a message only if the message's content is null. Some render no calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from emberline.core.errors import EmberlineError, EngineUnavailable

Message = dict[str, Any]

_NAME, _ARGUMENTS = "probe_tool", {"probe_key": "probe_value"}
PROBE_TOOL = {  # in the form that templates take
    "type": "function",
    "function": {"name": _NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}
_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "probe"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "probe0000", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}},
        ],
    },
    {"role": "tool", "content": "probe", "tool_call_id": "probe0000", "name": _NAME},
)


@dataclass(frozen=True, slots=True)
class CallForm:
    arguments_are_text: bool = False
    content_is_null: bool = False  # of a message with tool calls

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with their tool calls in this form.

        If the form needs a null content, the text of a message with calls becomes a message of its own before it.
        """
        fitted: list[Message] = []
        for message in messages:
            calls = message.get("tool_calls")
            if not calls:
                fitted.append(message)
                continue
            if self.content_is_null:
                if message.get("content"):
                    fitted.append({key: value for key, value in message.items() if key != "tool_calls"})
                message = {**message, "content": None}
            if self.arguments_are_text:
                message = {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}
            fitted.append(message)
        return fitted


_FORMS = tuple(CallForm(is_text, is_null) for is_text in (False, True) for is_null in (False, True))


def find_call_form(render: Callable[[list[Message]], str]) -> CallForm | None:
    """Return the first form with which the template renders a test call completely, as plain JSON.

    If there is none, return None if the template renders the messages of some form without the call's arguments.
    Otherwise return the default form. `render` renders messages with the template, and raises EmberlineError if the
    template fails.
    """
    leaves_out = False
    for form in _FORMS:
        try:
            text = render(form.apply(_PROBE))
        except EngineUnavailable:
            raise
        except EmberlineError:
            continue
        is_written = all(part in text for part in ("probe_key", "probe_value"))
        if is_written and _is_clean(text):
            return form
        leaves_out = leaves_out or not is_written
    return None if leaves_out else CallForm()


def _is_clean(text: str) -> bool:
    """Return whether the rendered arguments are plain JSON, not a Python dict's repr or JSON inside a JSON string."""
    return not any(wrong in text for wrong in ("{'probe_key'", '\\"probe_key', '"{"probe_key'))


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
