"""ToolStyle: the format in which a model family writes tool calls."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from emberline.api.call import Tool
from emberline.api.rule_writer import ANY_TEXT, RuleWriter
from emberline.api.tool_styles.call_reader import CallReader

Message = dict[str, Any]

MAX_CALLS_PER_REPLY = 16  # of a reply whose grammar forces tool calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStyle(ABC):
    name: str
    families: str  # the models that write calls like this
    begin: str  # marker that opens a call, or a group of calls
    markers: tuple[str, ...]  # texts that the detokenizer must keep if they are special tokens
    other_begin_markers: tuple[str, ...] = ()  # further texts that open a call in the model's output
    dropped_markers: tuple[str, ...] = ()  # texts after calls that carry no meaning of their own
    separator: str = ""  # text between two calls
    list_brackets: tuple[str, str] | None = None  # texts before and after several calls that share one `begin`
    markerless_starts: str = ""  # first characters of an output that begins with a call without `begin`
    mistaken_starts: str = ""  # those of an output in which a small model forgot `begin`
    gap_chars: str = ""  # characters besides white space that may separate calls
    ends_reasoning: bool = False  # `begin` ends reasoning that has no closing marker
    allows_several_calls: bool = True  # false: the model writes one call in a reply
    uses_channels: bool = False  # calls are messages with a header: see HarmonyParser
    template_signs: tuple[tuple[str, ...], ...] = ()  # a chat template with all texts of one group uses this style
    model_types: tuple[str, ...] = ()  # of checkpoints whose template has no signs of any style

    @property
    def begin_markers(self) -> tuple[str, ...]:
        return (self.begin, *self.other_begin_markers) if self.begin else self.other_begin_markers

    @abstractmethod
    def make_reader(self, begin: str, first_char: str, tools: Sequence[Tool]) -> CallReader | None:
        """Return a reader for the text of a call, or None if the text cannot be a call.

        `begin` is the opening marker before the text, or "" if there is none. `first_char` is the first character of
        the text, after the marker and white space.
        """

    @abstractmethod
    def format_call(self, name: str, arguments: str, number: int) -> str:
        """Return call `number` (from 0) as text, without the opening marker. `arguments` is a JSON object."""

    @abstractmethod
    def write_call(self, rules: RuleWriter, tool: Tool, rule_name: str) -> str:
        """Return a grammar expression for one call of this tool, without the opening marker.

        Raises InvalidRequest if the tool is strict and the format cannot enforce its schema.
        """

    def accepting_mistakes(self) -> Self:
        """Return the style for output that no grammar binds to the format: calls without `begin` are calls too."""
        return replace(self, markerless_starts=self.markerless_starts + self.mistaken_starts)

    def is_used_by(self, template: str) -> bool:
        return any(all(text in template for text in texts) for texts in self.template_signs)

    def fit_messages(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Return the messages of a request in the form that the chat templates of models with this style need.

        `tools` are the tools in the form that templates take.
        """
        return list(messages)

    def format_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return tool calls, given as (name, JSON of the arguments), as the model would write them."""
        bodies = [self.format_call(name, arguments, i) for i, (name, arguments) in enumerate(calls)]
        if self.list_brackets is None:
            return self.separator.join(self.begin + body for body in bodies)
        opening, closing = self.list_brackets
        return ("" if self.markerless_starts else self.begin) + opening + self.separator.join(bodies) + closing

    def write_forced_calls(self, rules: RuleWriter, allows_several: bool) -> str:
        """Return a grammar expression for an output of calls only. The rule `call` matches one call."""
        begin = "" if self.markerless_starts else rules.literal(self.begin)
        unit = f"{begin} {self._write_group(rules, allows_several)}"
        if not allows_several or self.list_brackets is not None:
            return unit
        return f"{unit} ({rules.literal(self.separator)} {unit}){{0,{MAX_CALLS_PER_REPLY - 1}}}"

    def write_optional_calls(self, rules: RuleWriter, allows_several: bool, text_markers: Sequence[str] = ()) -> str:
        """Return a grammar expression for text, calls, or both. Text may contain `text_markers`."""
        group = self._write_group(rules, allows_several)
        pattern = rf"(\s*[^{re.escape(self.markerless_starts)}\s]{ANY_TEXT})?" if self.markerless_starts else ANY_TEXT
        text = rules.text(pattern)
        if tokens := [rules.literal(marker) for marker in text_markers if marker in rules.special_tokens]:
            text = rules.add_rule("text", f"{text} (({' | '.join(tokens)}) {rules.text()})*")
            lead = f"{text} {rules.literal(self.begin)}"
        else:
            lead = rules.text_until(self.begin, pattern)
        lead = rules.add_rule("lead", lead)
        is_repeated = allows_several and self.list_brackets is None
        start = f"({lead} {group})* {text}" if is_repeated else f"{text} | {lead} {group}"
        return f"{start} | {group}" if self.markerless_starts else start

    def _write_group(self, rules: RuleWriter, allows_several: bool) -> str:
        """Return a grammar expression for what follows an opening marker: one call, or all calls that share it."""
        if self.list_brackets is None:
            return "call"
        opening, closing = (rules.literal(text) for text in self.list_brackets)
        more = f"({rules.literal(self.separator)} call){{0,{MAX_CALLS_PER_REPLY - 1}}}" if allows_several else ""
        return f"{opening} call {more} {closing}"
