"""Grammar rules for the parameters of a tool, for styles that do not write them as one JSON object."""

from __future__ import annotations

from typing import Protocol

from emberline.api.call import Tool
from emberline.api.rule_writer import RuleWriter
from emberline.api.tool_styles.parameter_schema import ParameterSchema, Schema
from emberline.core.errors import InvalidRequest

_UNSUPPORTED = ("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "dependentSchemas", "minProperties")


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
        if isinstance(values := alternative.get("enum"), list) and values:
            terms += [syntax.write_literal(value) for value in values]
        elif "const" in alternative:
            terms.append(syntax.write_literal(alternative["const"]))
        elif (type_ := alternative.get("type")) == "string":
            terms.append(syntax.write_string(alternative))
        elif isinstance(type_, str):
            lenient = {"x-guidance": {"lenient": not tool.strict}}
            term = rules.add_schema(f"{rule_name}_{i}", {**root.definitions, **alternative, **lenient})
            terms.append(syntax.write_json(term, alternative))
        else:
            terms.append(syntax.write_any())
    return " | ".join(dict.fromkeys(terms))


def reject_string_limits(tool: Tool, schema: Schema) -> None:
    """Raise InvalidRequest if a strict tool restricts the text of a string.

    Styles that write strings without quotation marks cannot enforce that.
    """
    for keyword in ("pattern", "format", "minLength", "maxLength"):
        if tool.strict and keyword in schema:
            raise InvalidRequest(
                f"the strict tool {tool.name!r} restricts a string by {keyword!r}, which cannot be enforced in this "
                "model's tool call format",
                param="tools",
                hint=f"remove {keyword!r}, or set strict to false",
            )
