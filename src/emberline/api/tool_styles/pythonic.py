"""Pythonic calls: [f(a=1, b="x"), g()]."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from emberline.api.call import Tool
from emberline.api.rule_writer import RuleWriter
from emberline.api.tool_styles.argument_writer import ArgumentWriter
from emberline.api.tool_styles.call_reader import WHITESPACE, CallReader
from emberline.api.tool_styles.json_arguments import JsonObjectReader
from emberline.api.tool_styles.parameter_rules import write_parameters
from emberline.api.tool_styles.parameter_schema import ParameterSchema, Schema
from emberline.api.tool_styles.python_literals import PythonLiteralScanner, literal_to_json
from emberline.api.tool_styles.python_rules import PythonLiteralRules, format_literal
from emberline.api.tool_styles.style import ToolStyle

_NAME_CHAR = re.compile(r"[\w.-]")
_ARGUMENT = re.compile(r"\s*(?P<key>[\w.$-]+)\s*=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicStyle(ToolStyle):
    end: str = ""  # marker that closes the calls
    reads_json: bool = False  # a JSON object is read as a call too

    def make_reader(self, begin: str, first_char: str, tools: Sequence[Tool]) -> CallReader | None:
        if first_char == "{" and self.reads_json:
            return JsonObjectReader(bool(begin), "name", ())
        if first_char == "[" or (begin and _NAME_CHAR.match(first_char)):
            return PythonicReader(self.end)
        return None

    def format_call(self, name: str, arguments: str, number: int) -> str:
        values = json.loads(arguments)
        return f"{name}({', '.join(f'{key}={format_literal(value)}' for key, value in values.items())})"

    def write_call(self, rules: RuleWriter, tool: Tool, rule_name: str) -> str:
        parameters = write_parameters(rules, tool, rule_name, PythonicParameterRules(rules, tool, rule_name))
        return f"{rules.literal(tool.name + '(')} {parameters} {rules.literal(')')}"


class PythonicReader(CallReader):
    """Reads calls in brackets, or without brackets one after the other up to the closing marker."""

    def __init__(self, end: str) -> None:
        super().__init__(self._read_opening)
        self._end = end
        self._in_list = False
        self._is_in_call = False  # the call that is being read has begun
        self._argument: list[str] = []
        self._scanner = PythonLiteralScanner()
        self._arguments = ArgumentWriter()

    @property
    def is_closing(self) -> bool:
        return self._state in (self._read_after_call, self._read_end)

    @property
    def is_likely_call(self) -> bool:
        return self.has_calls or self._state == self._read_argument

    def _read_opening(self, char: str) -> None:
        self._state = self._read_name
        if char == "[":
            self._in_list = True
        else:
            self._read_name(char)

    def _read_name(self, char: str) -> None:
        if char == "(" and self._word:
            self._state, self._argument, self._arguments = self._read_argument, [], ArgumentWriter()
            self._scanner, self._is_in_call = PythonLiteralScanner(), False
        elif _NAME_CHAR.match(char):
            self._word += char
        elif self._word or char not in WHITESPACE:
            self._reject()

    def _read_argument(self, char: str) -> None:
        if not self._scanner.is_at_top or char not in ",)":
            self._scanner.consume_char(char)
            self._argument.append(char)
            if self._scanner.depth < 0:
                self._reject()
            return
        text, self._argument = "".join(self._argument), []
        is_valid = self._add_argument(text) if text.strip() else char == ")"
        if not is_valid:
            self._reject()
        elif char == ")":
            self._confirm_call()
            self._add_event(self._arguments.write_end())
            self._word, self._state = "", self._read_after_call

    def _add_argument(self, text: str) -> bool:
        found = _ARGUMENT.fullmatch(text)
        value = literal_to_json(found["value"]) if found else None
        if found is None or value is None:
            return False
        self._confirm_call()
        self._add_event(self._arguments.write_key(found["key"]) + value)
        return True

    def _confirm_call(self) -> None:
        if not self._is_in_call:
            self._is_in_call = True
            self._start_call(self._word)

    def _read_after_call(self, char: str) -> None:
        if char == "," and self._in_list:
            self._state = self._read_name
        elif char == "]" and self._in_list:
            self._accept()
            self._state = self._read_end
            if not self._end:
                self._complete()
        elif char in WHITESPACE:
            if not self._in_list:
                self._accept()
        elif not self._in_list and self._end.startswith(char):
            self._state = self._read_end
            self._read_end(char)
        elif not self._in_list and _NAME_CHAR.match(char):
            self._state = self._read_name
            self._read_name(char)
        else:
            self._reject()

    def _read_end(self, char: str) -> None:
        self._expect_one_of(char, {self._end: self._complete})


class PythonicParameterRules:
    separator = ", "

    def __init__(self, rules: RuleWriter, tool: Tool, rule_name: str) -> None:
        self._rules, self._tool, self._rule_name = rules, tool, rule_name
        root = ParameterSchema(tool)
        self._literals = PythonLiteralRules(rules, root, f"{rule_name}_literal", is_strict=tool.strict)

    def write_parameter(self, name: str, value: str) -> str:
        return f"{self._rules.literal(name + '=')} {value}"

    def write_other_parameter(self) -> str:
        return f"{self._rules.regex('[A-Za-z_][A-Za-z0-9_]{0,63}=')} {self.write_any()}"

    def write_string(self, schema: Schema) -> str:
        lenient = {"x-guidance": {"lenient": not self._tool.strict}}
        return self._rules.add_schema(f"{self._rule_name}_s{self._rules.num_schemas}", {**schema, **lenient})

    def write_literal(self, value: object) -> str:
        return self._rules.literal(format_literal(value))

    def write_json(self, term: str, schema: Schema) -> str:
        """Return an expression for a value that is not a string.

        For numbers, and for schemas with keywords that the rules of Python literals cannot enforce, return `term`,
        which matches JSON.
        """
        if schema["type"] in ("integer", "number") or not self._literals.can_enforce(schema):
            return term
        return self._literals.write_value(schema)

    def write_any(self) -> str:
        return self._literals.write_any()


PYTHONIC = PythonicStyle(
    name="pythonic",
    families="Llama 3.2 and 4 with pythonic templates, ToolACE",
    begin="<|python_start|>",
    other_begin_markers=("<|python_tag|>",),
    dropped_markers=("<|python_end|>",),
    markers=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
    separator=", ",
    list_brackets=("[", "]"),
    markerless_starts="[{",
    gap_chars=";",
    reads_json=True,
    template_signs=(("[func_name1(",),),
)
LFM2 = PythonicStyle(
    name="lfm2",
    families="LFM2, LFM2.5",
    begin="<|tool_call_start|>",
    dropped_markers=("<|tool_call_end|>",),
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    separator=", ",
    list_brackets=("[", "]<|tool_call_end|>"),
    end="<|tool_call_end|>",
    template_signs=(("<|tool_call_start|>",),),
    model_types=("lfm2", "lfm2_moe"),
)
