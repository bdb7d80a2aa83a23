"""Gemma 4 and FunctionGemma: call:NAME{key:value}, with strings between markers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from emberline.api.call import Tool
from emberline.api.rule_writer import RuleWriter
from emberline.api.tool_styles.argument_writer import ArgumentWriter
from emberline.api.tool_styles.call_reader import CallReader
from emberline.api.tool_styles.gemma_literals import format_value, literal_to_json
from emberline.api.tool_styles.parameter_rules import reject_string_limits, write_parameters
from emberline.api.tool_styles.parameter_schema import Schema
from emberline.api.tool_styles.style import ToolStyle
from emberline.core.errors import InvalidRequest

_HEAD = re.compile(r"call:\s*([\w.-]+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCallStyle(ToolStyle):
    quote: str  # marker around strings
    end: str

    def make_reader(self, begin: str, first_char: str, tools: Sequence[Tool]) -> CallReader | None:
        return GemmaCallReader(self.quote, self.end) if first_char == "c" else None

    def format_call(self, name: str, arguments: str, number: int) -> str:
        return f"call:{name}{format_value(json.loads(arguments), self.quote)}{self.end}"

    def write_call(self, rules: RuleWriter, tool: Tool, rule_name: str) -> str:
        parameters = write_parameters(rules, tool, rule_name, GemmaParameterRules(rules, tool, self.quote))
        return f"{rules.literal(f'call:{tool.name}{{')} {parameters} {rules.literal('}' + self.end)}"


class GemmaCallReader(CallReader):
    def __init__(self, quote: str, end: str) -> None:
        super().__init__(self._read_head)
        self._quote, self._end = quote, end
        self._argument: list[str] = []  # characters of the key and the value that are being read
        self._in_string = False
        self._tail = ""  # the last characters, which may become the marker around strings
        self._depth = 0
        self._arguments = ArgumentWriter()

    @property
    def is_closing(self) -> bool:
        return self._state == self._read_end

    def _read_head(self, char: str) -> None:
        if char != "{":
            return
        found = _HEAD.fullmatch(self.unaccepted_text[:-1])
        if found is None:
            self._reject()
            return
        self._start_call(found[1])
        self._state = self._read_argument

    def _read_argument(self, char: str) -> None:
        if not self._in_string and self._depth == 0 and char in ",}":
            self._finish_argument(char)
            return
        self._argument.append(char)
        self._tail = (self._tail + char)[-len(self._quote) :]
        if self._tail == self._quote:
            self._in_string, self._tail = not self._in_string, ""
        elif not self._in_string:
            self._depth += (char in "{[") - (char in "}]")

    def _finish_argument(self, char: str) -> None:
        text, self._argument, self._tail = "".join(self._argument), [], ""
        if text.strip():
            key, _, value = text.partition(":")
            converted = literal_to_json(value, self._quote)
            if converted is None:
                self._reject()
                return
            self._add_event(self._arguments.write_key(key.strip().replace(self._quote, "")) + converted)
        elif char == ",":
            self._reject()
            return
        if char == "}":
            self._add_event(self._arguments.write_end())
            self._state = self._read_end

    def _read_end(self, char: str) -> None:
        self._expect_one_of(char, {self._end: self._complete})


class GemmaParameterRules:
    separator = ","

    def __init__(self, rules: RuleWriter, tool: Tool, quote: str) -> None:
        self._rules, self._tool, self._quote = rules, tool, quote

    def write_parameter(self, name: str, value: str) -> str:
        return f"{self._rules.literal(name + ':')} {value}"

    def write_other_parameter(self) -> str:
        return f"{self._rules.regex('[A-Za-z_][A-Za-z0-9_]{0,63}:')} {self.write_any()}"

    def write_string(self, schema: Schema) -> str:
        reject_string_limits(self._tool, schema)
        return f"{self._rules.literal(self._quote)} {self._rules.text_until(self._quote)}"

    def write_literal(self, value: object) -> str:
        return self._rules.literal(format_value(value, self._quote))

    def write_json(self, term: str, schema: Schema) -> str:
        if schema["type"] not in ("array", "object"):
            return term
        if self._tool.strict:
            raise InvalidRequest(
                f"the strict tool {self._tool.name!r} has a parameter of type {schema['type']!r}, which cannot be "
                "enforced in this model's tool call format",
                param="tools",
                hint="set strict to false",
            )
        self.write_any()
        return f"gemma_{schema['type']}"

    def write_any(self) -> str:
        """Return the name of a rule that matches any value, and add the rules that it needs."""
        string = f"{self._rules.literal(self._quote)} {self._rules.text_until(self._quote)}"
        words = '"true" | "false" | "null"'
        key = self._rules.regex("[A-Za-z_][A-Za-z0-9_]{0,63}:")
        number = self._rules.regex(r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?")
        self._rules.add_rule("gemma_array", '"[" (gemma_value ("," gemma_value)*)? "]"')
        self._rules.add_rule("gemma_object", f'"{{" ({key} gemma_value ("," {key} gemma_value)*)? "}}"')
        return self._rules.add_rule("gemma_value", f"{string} | {words} | {number} | gemma_array | gemma_object")


GEMMA4 = GemmaCallStyle(
    name="gemma4",
    families="Gemma 4",
    begin="<|tool_call>",
    dropped_markers=("<tool_call|>",),
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
    quote='<|"|>',
    end="<tool_call|>",
    template_signs=(("<|tool_call>call:",),),
    model_types=("gemma4", "gemma4_text"),
)
FUNCTION_GEMMA = GemmaCallStyle(
    name="functiongemma",
    families="FunctionGemma",
    begin="<start_function_call>",
    dropped_markers=("<end_function_call>",),
    markers=("<start_function_call>", "<end_function_call>", "<escape>"),
    quote="<escape>",
    end="<end_function_call>",
    template_signs=(("<start_function_call>",),),
)
