"""Harmony, the format of gpt-oss: a call is a message on the commentary channel, addressed to a function.

HarmonyParser reads these calls, because it reads the channels of the whole output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emberline.api.rule_writer import RuleWriter
from emberline.api.tool_styles.json_arguments import NamedCallStyle
from emberline.api.tool_styles.style import Message

MESSAGE_END = "<|end|><|start|>assistant"  # and the start of the next message's header


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyStyle(NamedCallStyle):
    def write_optional_calls(self, rules: RuleWriter, allows_several: bool, text_markers: Sequence[str] = ()) -> str:
        """Return a grammar expression for messages to the user, and then the answer or a call."""
        heads = " | ".join(rules.literal(f"<|channel|>{name}<|message|>") for name in ("analysis", "commentary"))
        rules.add_rule("message", f"({heads}) {rules.text_until(MESSAGE_END)}")
        rules.add_rule("final", f"{rules.literal('<|channel|>final<|message|>')} {rules.text()}")
        return f"message* (final | {rules.literal(self.begin)} call)"

    def fit_messages(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Return the messages in the form that the template of gpt-oss takes.

        The template renders only the first call of a message, and it reads reasoning from the field `thinking`. So each
        call becomes a message of its own, followed by the call's result.
        """
        results = {message["tool_call_id"]: message for message in messages if "tool_call_id" in message}
        fitted: list[Message] = []
        moved: set[str] = set()
        for message in messages:
            if message.get("tool_call_id") in moved:
                continue
            calls = message.get("tool_calls") or []
            if not calls:
                fitted.append(dict(message))
            for i, call in enumerate(calls):
                fitted.append(_make_call_message(message if i == 0 else {"role": message["role"]}, call))
                if len(calls) > 1 and call["id"] in results:
                    fitted.append(dict(results[call["id"]]))
                    moved.add(call["id"])
        return fitted


def _make_call_message(message: Message, call: dict[str, Any]) -> Message:
    """Return a message with one call, in which reasoning and text are joined as the field `thinking`.

    The template renders only one text before a call."""
    thoughts = [text for text in (message.get("reasoning_content"), message.get("content")) if text]
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    thinking = {"thinking": "\n".join(thoughts)} if thoughts else {}
    return {**rest, "content": "", **thinking, "tool_calls": [call]}


HARMONY = HarmonyStyle(
    name="harmony",
    families="gpt-oss",
    begin="<|channel|>commentary to=functions.",
    markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    head="%(name)s <|constrain|>json<|message|>",
    tail="",  # <|call|> ends the output
    ends=("<|call|>",),
    head_pattern=re.compile(r"(?P<name>[\w.-]+)\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>\s*"),
    allows_several_calls=False,
    uses_channels=True,
    template_signs=(("<|start|>assistant", "<|channel|>"),),
    model_types=("gpt_oss",),
)
