"""Phi-4-mini: a JSON array of calls between <|tool_call|> markers, or after the word `functools`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emberline.api.tool_styles.json_arguments import JsonObjectStyle
from emberline.api.tool_styles.style import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi4Style(JsonObjectStyle):
    def fit_messages(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Return the messages with the tools in the system message, where Phi's own template reads them."""
        if not tools:
            return list(messages)
        has_system = bool(messages) and messages[0]["role"] in ("system", "developer")
        first = messages[0] if has_system else {"role": "system", "content": ""}
        listing = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return [{**first, "tools": listing}, *messages[1 if has_system else 0 :]]


PHI4 = Phi4Style(
    name="phi4-mini",
    families="Phi-4-mini",
    begin="<|tool_call|>",
    other_begin_markers=("functools",),
    dropped_markers=("<|/tool_call|>",),
    markers=("<|tool_call|>", "<|/tool_call|>"),
    head='{"name": "%(name)s", "arguments": ',
    tail="}",
    ends=("<|/tool_call|>",),
    separator=", ",
    list_brackets=("[", "]<|/tool_call|>"),
    allows_list=True,
    template_signs=(("<|tool|>",),),
)
FUNCTOOLS = JsonObjectStyle(
    name="functools",
    families="Phi-4-mini with vLLM's template, FireFunction",
    begin="functools",
    markers=(),
    head='{"name": "%(name)s", "arguments": ',
    tail="}",
    separator=", ",
    list_brackets=("[", "]"),
    allows_list=True,
    template_signs=(("functools[",),),
)
