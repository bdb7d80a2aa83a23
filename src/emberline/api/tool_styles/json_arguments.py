"""Tool styles whose calls contain their arguments as JSON, and the readers of such calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emberline.api.call import Tool
from emberline.api.rule_writer import RuleWriter
from emberline.api.tool_styles.call_reader import WHITESPACE, CallReader, ParseStatus
from emberline.api.tool_styles.json_call import JsonCallParser, JsonValueScanner
from emberline.api.tool_styles.style import ToolStyle

NUMBER_FIELD = "%(number)d"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def make_grammar_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of the tool's arguments, always of type object.

    Unknown schema keywords are errors only for strict tools."""
    return {**(tool.parameters or NO_PARAMETERS), "type": "object", "x-guidance": {"lenient": not tool.strict}}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonArgumentsStyle(ToolStyle):
    """A style that writes a call as `head`, the arguments as JSON, and `tail`."""

    head: str  # text before the arguments, with the fields %(name)s and %(number)d
    tail: str  # text after the arguments
    ends: tuple[str, ...] = ()  # markers that can close a call, without white space; (): calls have none

    def format_call(self, name: str, arguments: str, number: int) -> str:
        return self.head % {"name": name, "number": number} + arguments + self.tail

    def write_call(self, rules: RuleWriter, tool: Tool, rule_name: str) -> str:
        parts = [part % {"name": tool.name} for part in self.head.split(NUMBER_FIELD)]
        head = f" {rules.regex('[0-9]{1,4}')} ".join(rules.literal(part) for part in parts)
        schema = rules.add_schema(f"{rule_name}_arguments", make_grammar_schema(tool))
        return f"{head} {schema} {rules.literal(self.tail)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonObjectStyle(JsonArgumentsStyle):
    """A style that writes a call as a JSON object with the tool's name and the arguments."""

    name_key: str = "name"
    allows_list: bool = False  # a JSON array of calls may follow `begin`

    def make_reader(self, begin: str, first_char: str, tools: Sequence[Tool]) -> CallReader | None:
        if first_char == "{" or (first_char == "[" and self.allows_list):
            return JsonObjectReader(bool(begin), self.name_key, self.ends if begin else ())
        if first_char == "`" and not begin:
            return CodeBlockReader(self.name_key)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCallStyle(JsonArgumentsStyle):
    """A style that writes the tool's name as plain text before the arguments."""

    head_pattern: re.Pattern[str]  # text before the arguments, with the groups `name` and perhaps `id`
    head_chars: re.Pattern[str] = re.compile(r"[^{}\"]")  # characters that may occur in it

    def make_reader(self, begin: str, first_char: str, tools: Sequence[Tool]) -> CallReader | None:
        return NamedCallReader(self.head_pattern, self.head_chars, self.ends)


class JsonObjectReader(CallReader):
    """Reads a call as a JSON object, or an array of such calls."""

    def __init__(self, has_marker: bool, name_key: str, ends: tuple[str, ...]) -> None:
        super().__init__(self._read_opening)
        self._has_marker, self._name_key, self._ends = has_marker, name_key, ends
        self._in_list = False
        self._call = JsonCallParser(has_marker, name_key)

    @property
    def is_closing(self) -> bool:
        if self._state == self._read_call:
            return self._call.is_confirmed
        return self._state in (self._read_after_element, self._read_end)

    @property
    def is_likely_call(self) -> bool:
        return self._has_marker or self.has_calls or self._call.is_likely_call

    @property
    def is_in_head(self) -> bool:
        return not self._call.is_confirmed

    def _read_opening(self, char: str) -> None:
        if char == "[":
            self._in_list, self._state = True, self._read_element
        else:
            self._read_element(char)

    def _read_element(self, char: str) -> None:
        if char == "{":
            self._call, self._state = JsonCallParser(self._has_marker, self._name_key), self._read_call
            self._call.feed(char)
        elif char not in WHITESPACE:
            self._reject()

    def _read_call(self, char: str) -> None:
        was_confirmed = self._call.is_confirmed
        arguments = self._call.feed(char)
        if self._call.is_confirmed and not was_confirmed:
            assert self._call.name is not None
            self._start_call(self._call.name)
        if arguments:
            self._add_event(arguments)
        if self._call.status is ParseStatus.INVALID:
            self._reject()
        elif self._call.status is ParseStatus.COMPLETE:
            self._accept()
            self._state = self._read_after_element
            if not self._in_list:
                self._read_closing()

    def _read_after_element(self, char: str) -> None:
        if char == ",":
            self._state = self._read_element
        elif char == "]":
            self._accept()
            self._read_closing()
        elif char not in WHITESPACE:
            self._reject()

    def _read_closing(self) -> None:
        self._state = self._read_end
        if not self._ends:
            self._complete()

    def _read_end(self, char: str) -> None:
        self._expect_one_of(char, dict.fromkeys(self._ends, self._complete))


class CodeBlockReader(JsonObjectReader):
    """Reads a call as a JSON object in a code block, as small models write it without the markers of their format."""

    def __init__(self, name_key: str) -> None:
        super().__init__(False, name_key, ("```",))
        self._state = self._read_fence

    def _read_fence(self, char: str) -> None:
        self._expect_one_of(char, dict.fromkeys(("```json", "```\n"), self._read_content))

    def _read_content(self) -> None:
        self._state = self._read_opening


class NamedCallReader(CallReader):
    """Reads a head with the tool's name, and then the arguments as JSON."""

    def __init__(self, head_pattern: re.Pattern[str], head_chars: re.Pattern[str], ends: tuple[str, ...]) -> None:
        super().__init__(self._read_head)
        self._head_pattern, self._head_chars, self._ends = head_pattern, head_chars, ends
        self._scanner = JsonValueScanner()

    @property
    def is_closing(self) -> bool:
        return self._state == self._read_end

    def _read_head(self, char: str) -> None:
        if char == "{" and self._start_from_head(self.unaccepted_text[:-1]):
            self._state = self._read_arguments
            self._read_arguments(char)
        elif not self._head_chars.match(char):
            self._reject()
        elif self._ends and char == self._ends[-1][-1]:
            self._read_call_without_arguments(self.unaccepted_text)

    def _read_call_without_arguments(self, text: str) -> None:
        for end in self._ends:
            if text.endswith(end):
                if self._start_from_head(text.removesuffix(end)):
                    self._add_event("{}")
                    self._complete()
                else:
                    self._reject()
                return

    def _start_from_head(self, head: str) -> bool:
        found = self._head_pattern.fullmatch(head)
        if found is None:
            return False
        self._start_call(found["name"], found.groupdict().get("id"))
        return True

    def _read_arguments(self, char: str) -> None:
        self._add_event(char)
        if self._scanner.consume_char(char):
            self._state = self._read_end
            if not self._ends:
                self._complete()

    def _read_end(self, char: str) -> None:
        if char not in WHITESPACE:
            self._expect_one_of(char, dict.fromkeys(self._ends, self._complete))
