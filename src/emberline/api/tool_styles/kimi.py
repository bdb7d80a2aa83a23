"""Kimi K2: a section of calls, each with an id that contains the tool's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emberline.api.tool_styles.json_arguments import NamedCallStyle
from emberline.api.tool_styles.style import Message

_ID = re.compile(r"functions\.[^\s:]+:\d+")
_ARGUMENTS = "<|tool_call_argument_begin|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiStyle(NamedCallStyle):
    def fit_messages(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Return the messages with ids of the form functions.NAME:NUMBER, which the model was trained on.

        Ids that have this form are kept. Others are numbered by the position of the call in the conversation.
        """
        fitted, number, ids = [], 0, dict[str, str]()
        for message in messages:
            message = dict(message)
            if calls := message.get("tool_calls"):
                message["tool_calls"] = []
                for call in calls:
                    id_ = call["id"] if _ID.fullmatch(call["id"]) else f"functions.{call['function']['name']}:{number}"
                    ids[call["id"]], number = id_, number + 1
                    message["tool_calls"].append({**call, "id": id_})
            if "tool_call_id" in message:
                message["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
            fitted.append(message)
        return fitted


KIMI = KimiStyle(
    name="kimi",
    families="Kimi K2, Kimi K2.5",
    begin="<|tool_calls_section_begin|>",
    other_begin_markers=("<|tool_call_begin|>",),
    dropped_markers=("<|tool_calls_section_end|>", "<|tool_call_end|>"),
    markers=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        _ARGUMENTS,
        "<|tool_call_end|>",
    ),
    list_brackets=("", "<|tool_calls_section_end|>"),
    head=f"<|tool_call_begin|>functions.%(name)s:%(number)d{_ARGUMENTS}",
    tail="<|tool_call_end|>",
    ends=("<|tool_call_end|>",),
    head_pattern=re.compile(
        rf"(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*{re.escape(_ARGUMENTS)}\s*"
    ),
    ends_reasoning=True,
    template_signs=(("<|tool_call_begin|>",), ("<|tool_calls_section_begin|>",)),
    model_types=("kimi_k2", "kimi_k25"),
)
