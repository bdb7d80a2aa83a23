"""Tool styles whose calls are XML-like: each parameter is a tag with plain text as its value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from emberline.api.call import Tool
from emberline.api.rule_writer import RuleWriter
from emberline.api.tool_styles.argument_writer import ArgumentWriter, TextValueReader, escape_json
from emberline.api.tool_styles.call_reader import CallReader
from emberline.api.tool_styles.parameter_rules import reject_string_limits, write_parameters
from emberline.api.tool_styles.parameter_schema import ParameterSchema, Schema
from emberline.api.tool_styles.style import ToolStyle


@dataclass(frozen=True, slots=True)
class XmlSyntax:
    """The texts between the parts of a call. White space between tags is ignored when a call is read."""

    call_open: str  # before the tool's name
    name_end: str  # after the name; empty: the name ends at a line break or at the next tag
    key_open: str
    key_end: str  # after a parameter's name
    value_open: str  # between `key_end` and the parameter's value; empty: no such text
    value_end: str
    call_end: str
    section_end: str = ""  # after the call; its absence is no error
    after_call: str = ""  # white space that the model writes after the call
    line: str = ""  # white space that the model writes between tags
    trims_lines: bool = False  # the model writes a line break before and after each value
    is_call_open_on_new_line: bool = True  # `line` precedes `call_open`
    string_key_end: str = ""  # replaces `key_end` before a string; empty: only the tool's schema shows the type

    @property
    def call_head(self) -> str:
        """The text before the tool's name."""
        return self.line + self.call_open if self.call_open and self.is_call_open_on_new_line else self.call_open

    @property
    def call_tail(self) -> str:
        """The text after the parameters."""
        return self.call_end + (self.line + self.section_end if self.section_end else "") + self.after_call

    def end_of_key(self, is_string: bool) -> str:
        """Return the text between a parameter's name and its value."""
        end = self.string_key_end if is_string and self.string_key_end else self.key_end
        newline = "\n" if self.trims_lines else ""
        return end + (self.line + self.value_open if self.value_open else "") + newline


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlStyle(ToolStyle):
    syntax: XmlSyntax

    def make_reader(self, begin: str, first_char: str, tools: Sequence[Tool]) -> CallReader | None:
        if begin == self.syntax.call_open:
            return XmlCallReader(self.syntax, tools, is_name_next=True)
        if self.syntax.call_open and not self.syntax.call_open.startswith(first_char):
            return None
        return XmlCallReader(self.syntax, tools, is_name_next=not self.syntax.call_open)

    def format_call(self, name: str, arguments: str, number: int) -> str:
        s = self.syntax
        parts = [s.call_head, name, s.name_end, s.line]
        newline = "\n" if s.trims_lines else ""
        for key, value in json.loads(arguments).items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            parts += [s.key_open, key, s.end_of_key(isinstance(value, str)), text, newline, s.value_end, s.line]
        return "".join([*parts, s.call_tail])

    def write_call(self, rules: RuleWriter, tool: Tool, rule_name: str) -> str:
        s = self.syntax
        head = rules.literal(s.call_head + tool.name + s.name_end + s.line)
        parameters = write_parameters(rules, tool, rule_name, XmlParameterRules(rules, tool, s))
        return f"{head} {parameters} {rules.literal(s.call_tail)}"


class XmlCallReader(CallReader):
    def __init__(self, syntax: XmlSyntax, tools: Sequence[Tool], is_name_next: bool) -> None:
        read_name = self._read_name if syntax.name_end else self._read_plain_name
        super().__init__(read_name if is_name_next else self._read_call_open)
        self._syntax = syntax
        self._name_reader = TextValueReader(syntax.name_end, trims_lines=False)
        self._tools = {tool.name: tool for tool in tools}
        self._schema = ParameterSchema(None)
        self._arguments = ArgumentWriter()
        self._name = self._key = ""
        self._is_string = False  # the value is a string
        self._key_reader = self._value_reader = TextValueReader(syntax.value_end, trims_lines=syntax.trims_lines)
        self._value: list[str] = []  # text of a value that is converted when it is complete

    @property
    def is_closing(self) -> bool:
        return self._state == self._read_section_end

    def _read_call_open(self, char: str) -> None:
        self._expect_one_of(char, {self._syntax.call_open: self._begin_name})

    def _begin_name(self) -> None:
        self._state = self._read_name

    def _read_name(self, char: str) -> None:
        """Read the tool's name up to the text that ends it."""
        self._name += self._name_reader.feed(char)
        if self._name_reader.is_complete:
            self._finish_name()
        elif any(wrong in self._name for wrong in '{}"<>\n'):
            self._reject()

    def _read_plain_name(self, char: str) -> None:
        """Read the tool's name up to a line break or a tag."""
        if char in "\n<":
            self._finish_name()
            if char == "<":
                self._state(char)
        elif char in '{}">':
            self._reject()
        else:
            self._name += char

    def _finish_name(self) -> None:
        self._name = self._name.strip()
        self._schema = ParameterSchema(self._tools.get(self._name))
        self._state = self._read_between
        if not self._name:
            self._reject()

    def _read_between(self, char: str) -> None:
        """Read the tag after the name or after a parameter."""
        self._expect_one_of(
            char, {self._syntax.key_open: self._begin_key, self._syntax.call_end: self._finish_arguments}
        )

    def _confirm_call(self) -> None:
        if not self.has_calls:
            self._start_call(self._name)

    def _begin_key(self) -> None:
        self._confirm_call()
        ends = [end for end in (self._syntax.key_end, self._syntax.string_key_end) if end]
        self._key, self._key_reader = "", TextValueReader(*ends, trims_lines=False)
        self._state = self._read_key

    def _read_key(self, char: str) -> None:
        self._key += self._key_reader.feed(char)
        if self._key_reader.is_complete:
            self._key = self._key.strip()
            self._is_string = self._key_reader.end_marker == self._syntax.string_key_end or (
                not self._syntax.string_key_end and self._schema.is_string(self._key)
            )
            if self._syntax.value_open:
                self._state = self._read_value_open
            else:
                self._begin_value()

    def _read_value_open(self, char: str) -> None:
        self._expect_one_of(char, {self._syntax.value_open: self._begin_value})

    def _begin_value(self) -> None:
        self._value_reader = TextValueReader(self._syntax.value_end, trims_lines=self._syntax.trims_lines)
        self._value = []
        if self._is_string:
            self._add_event(self._arguments.write_key(self._key) + '"')
            self._state = self._read_string
        else:
            self._state = self._read_value

    def _read_string(self, char: str) -> None:
        """Pass on the text of a string parameter as it comes."""
        text = self._value_reader.feed(char)
        if self._value_reader.is_complete:
            self._add_event(escape_json(text) + '"')
            self._state = self._read_between
        elif text:
            held = self._unaccepted[len(self._unaccepted) - self._value_reader.num_held :]
            self._add_event(escape_json(text))
            self._unaccepted.extend(held)

    def _read_value(self, char: str) -> None:
        self._value.append(self._value_reader.feed(char))
        if self._value_reader.is_complete:
            value = self._schema.to_json(self._key, "".join(self._value))
            self._add_event(self._arguments.write_key(self._key) + value)
            self._state = self._read_between

    def _finish_arguments(self) -> None:
        self._confirm_call()
        self._add_event(self._arguments.write_end())
        self._state = self._read_section_end
        if not self._syntax.section_end:
            self._complete()

    def _read_section_end(self, char: str) -> None:
        self._expect_one_of(char, {self._syntax.section_end: self._complete})

    def _complete_at_end(self) -> None:
        if self._state == self._read_between and self.has_calls:
            self._finish_arguments()


class XmlParameterRules:
    """Grammar rules for the parameters of one tool."""

    separator = ""

    def __init__(self, rules: RuleWriter, tool: Tool, syntax: XmlSyntax) -> None:
        self._rules, self._tool, self._syntax = rules, tool, syntax
        self._value_end = ("\n" if syntax.trims_lines else "") + syntax.value_end

    def write_parameter(self, name: str, value: str) -> str:
        return f"{self._rules.literal(self._syntax.key_open + name)} {value} {self._rules.literal(self._syntax.line)}"

    def write_other_parameter(self) -> str:
        key = f"{self._rules.literal(self._syntax.key_open)} {self._rules.regex('[A-Za-z0-9_.-]{1,64}')}"
        return f"{key} ({self.write_any()}) {self._rules.literal(self._syntax.line)}"

    def write_string(self, schema: Schema) -> str:
        reject_string_limits(self._tool, schema)
        return f"{self._open_value(is_string=True)} {self._rules.text_until(self._value_end)}"

    def _open_value(self, is_string: bool) -> str:
        return self._rules.literal(self._syntax.end_of_key(is_string))

    def write_literal(self, value: object) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return self._rules.literal(self._syntax.end_of_key(isinstance(value, str)) + text + self._value_end)

    def write_json(self, term: str, schema: Schema) -> str:
        return f"{self._open_value(is_string=False)} {term} {self._rules.literal(self._value_end)}"

    def write_any(self) -> str:
        text = self.write_string({})
        if not self._syntax.string_key_end:
            return text
        value = self._rules.add_schema(f"any{self._rules.num_schemas}", {})
        return f"{text} | {self.write_json(value, {})}"
