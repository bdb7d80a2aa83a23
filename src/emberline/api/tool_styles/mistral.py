"""Mistral: calls after [TOOL_CALLS], as a JSON array or as name and arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emberline.api.call import Tool
from emberline.api.tool_styles.call_reader import CallReader
from emberline.api.tool_styles.json_arguments import JsonArgumentsStyle, JsonObjectReader, NamedCallReader
from emberline.api.tool_styles.style import Message

# The name, then optionally an id that the model wrote and [ARGS].
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(?:\[CALL_ID\][A-Za-z0-9_-]+)?(?:\[ARGS\])?\s*")
_NAMED_CHARS = re.compile(r"[A-Za-z0-9_.\-\[\]\s]")
_MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralStyle(JsonArgumentsStyle):
    """Reads calls as a JSON array and as name and arguments, whichever form the chat template uses."""

    def make_reader(self, begin: str, first_char: str, tools: Sequence[Tool]) -> CallReader | None:
        if first_char in "{[":
            return JsonObjectReader(True, "name", self.ends)
        if first_char.isalnum() or first_char == "_":
            return NamedCallReader(_NAMED, _NAMED_CHARS, self.ends)
        return None

    def fit_messages(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Return the messages with tool call ids of nine letters or digits, as Mistral's templates require."""
        fitted = []
        for message in messages:
            message = dict(message)
            if "tool_call_id" in message:
                message["tool_call_id"] = _make_nine_char_id(message["tool_call_id"])
            if message.get("tool_calls"):
                calls = message["tool_calls"]
                message["tool_calls"] = [{**call, "id": _make_nine_char_id(call["id"])} for call in calls]
            fitted.append(message)
        return fitted


def _make_nine_char_id(id_: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", id_)[-9:].rjust(9, "0")


MISTRAL = MistralStyle(
    name="mistral",
    families="Mistral with tokenizers up to v7",
    begin="[TOOL_CALLS]",
    markers=_MARKERS,
    head='{"name": "%(name)s", "arguments": ',
    tail="}",
    separator=", ",
    list_brackets=("[", "]"),
    template_signs=(("[TOOL_CALLS]",),),
)
MISTRAL_ARGS = MistralStyle(
    name="mistral-args",
    families="Mistral with tokenizers from v11 on",
    begin="[TOOL_CALLS]",
    markers=_MARKERS,
    head="%(name)s[ARGS]",
    tail="",
    template_signs=(("[TOOL_CALLS]", "[ARGS]"),),
)
