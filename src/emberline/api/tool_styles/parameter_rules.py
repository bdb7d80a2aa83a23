"""Grammar rules for the parameters of a tool, for styles that do not write them as one JSON object."""

from __future__ import annotations

import json
from typing import Protocol

from emberline.api.call import Tool
from emberline.api.rule_writer import RuleWriter
from emberline.api.tool_styles.parameter_schema import ParameterSchema, Schema
from emberline.core.errors import InvalidRequest
from emberline.core.json_schema import ANNOTATIONS

MAX_NESTED_CHOICES = 256  # schemas of one parameter that are alternatives or references
_UNSUPPORTED = (
    *("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("dependencies", "dependentRequired", "dependentSchemas", "enum", "const"),
)


class ParameterRules(Protocol):
    """Writes grammar expressions for the parameters of tool calls in one model family's format."""

    @property
    def separator(self) -> str:
        """The text between two parameters."""

    def write_parameter(self, name: str, value: str) -> str:
        """Return an expression for the parameter `name`. `value` is an expression for its value."""

    def write_other_parameter(self) -> str:
        """Return an expression for a parameter that the schema does not list."""

    def write_string(self, schema: Schema) -> str: ...

    def write_literal(self, value: object) -> str: ...

    def write_json(self, term: str, schema: Schema) -> str:
        """Return an expression for a value other than a string. `term` matches the JSON values of the schema."""

    def write_any(self) -> str: ...


def write_parameters(rules: RuleWriter, tool: Tool, rule_name: str, syntax: ParameterRules) -> str:
    """Return an expression for the parameters of a call, in the order of the tool's schema.

    Raises InvalidRequest if the tool is strict and its schema has a keyword that cannot be enforced.
    """
    schema = ParameterSchema(tool)
    if tool.strict and (keyword := next((key for key in _UNSUPPORTED if key in schema.top), None)):
        raise InvalidRequest(
            f"the parameters of the strict tool {tool.name!r} have the keyword {keyword!r}, which cannot be enforced "
            "in this model's tool call format",
            param="tools",
            hint=f"remove {keyword!r}, or set strict to false",
        )
    items = []
    for i, parameter in enumerate(schema.list_parameters()):
        if tool.strict and (keyword := find_unenforced_keyword(schema, parameter.schema)):
            raise InvalidRequest(
                f"the parameter {parameter.name!r} of the strict tool {tool.name!r} combines {keyword!r} with other "
                "keywords, which cannot be enforced in this model's tool call format",
                param="tools",
                hint=f"write the parameter without {keyword!r}, or set strict to false",
            )
        value = _write_value(rules, tool, schema, parameter.schema, f"{rule_name}_p{i}", syntax)
        items.append((syntax.write_parameter(parameter.name, f"({value})"), parameter.is_required))
    allows_others = schema.top.get("additionalProperties") is not False and not tool.strict
    other = syntax.write_other_parameter() if allows_others else None
    return rules.write_sequence(f"{rule_name}_parameters", items, syntax.separator, other)


def _write_value(
    rules: RuleWriter, tool: Tool, root: ParameterSchema, schema: Schema, rule_name: str, syntax: ParameterRules
) -> str:
    terms = []
    for i, alternative in enumerate(root.alternatives(schema)):
        if (values := root.list_values(alternative, schema)) is not None:
            terms += [syntax.write_literal(value) for value in values]
        elif (type_ := alternative.get("type")) == "string":
            terms.append(syntax.write_string(alternative))
        elif isinstance(type_, str):
            lenient = {"x-guidance": {"lenient": not tool.strict}}
            term = rules.add_schema(f"{rule_name}_{i}", {**root.definitions, **alternative, **lenient})
            terms.append(syntax.write_json(term, alternative))
        else:
            terms.append(syntax.write_any())
    if not terms:
        raise InvalidRequest(
            f"a parameter of the tool {tool.name!r} has an enum or const without a value that matches its schema: "
            f"{json.dumps(schema)[:100]}",
            param="tools",
            hint="add values of the parameter's type",
        )
    return " | ".join(dict.fromkeys(terms))


def find_unenforced_keyword(root: ParameterSchema, schema: object) -> str | None:
    """Return a keyword that the alternatives of a parameter leave out, or None.

    A schema is written as its alternatives, of one type each. What stands beside `anyOf` or `$ref` is enforced only if
    all alternatives list their values."""
    alternatives = list(root.alternatives(schema))
    if all(root.list_values(each, schema) is not None for each in alternatives):
        return None
    todo = [schema]
    for _ in range(MAX_NESTED_CHOICES):
        if not todo:
            break
        each = todo.pop()
        keywords = each.keys() - ANNOTATIONS if isinstance(each, dict) else set()
        if not isinstance(each, dict) or not keywords:
            continue
        choice = next((key for key in ("$ref", "anyOf", "oneOf") if key in keywords), None)
        if choice is None:
            if "type" not in keywords and not keywords & {"enum", "const"}:
                return str(min(keywords))
        elif len(keywords) > 1 or (choice == "oneOf" and not _have_distinct_types(alternatives)):
            return choice
        else:
            todo += [root.resolve(each)] if choice == "$ref" else each[choice]
    return "anyOf" if todo else None


def _have_distinct_types(alternatives: list[Schema]) -> bool:
    types = ["number" if each.get("type") == "integer" else each.get("type") for each in alternatives]
    return None not in types and len(set(types)) == len(types)


def reject_string_limits(tool: Tool, schema: Schema) -> None:
    """Raise InvalidRequest if a strict tool restricts the text of a string.

    Styles that write strings without quotation marks cannot enforce that.
    """
    for keyword in ("pattern", "format", "minLength", "maxLength", "allOf", "not", "if"):
        if tool.strict and keyword in schema:
            raise InvalidRequest(
                f"the strict tool {tool.name!r} restricts a string by {keyword!r}, which cannot be enforced in this "
                "model's tool call format",
                param="tools",
                hint=f"remove {keyword!r}, or set strict to false",
            )
