"""PythonLiteralRules: grammar rules for arrays and objects that a model writes as Python literals."""

from __future__ import annotations

import json
from typing import Any

from emberline.api.rule_writer import RuleWriter
from emberline.api.tool_styles.parameter_schema import ParameterSchema, Schema

WORDS = {True: "True", False: "False", None: "None"}
BOOLEAN_RULE, NULL_RULE = '"True" | "False"', '"None"'

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "$schema", "$defs", "definitions"})
_CHOICES = frozenset({"anyOf", "$ref"})
# The keywords of arrays and objects that the rules enforce. Strings and numbers are JSON, with all their keywords.
_NESTING = frozenset({"type", "items", "properties", "required", "additionalProperties"})


def format_literal(value: object) -> str:
    """Return a JSON value as a Python literal. Strings are quoted as in JSON."""
    match value:
        case bool() | None:
            return WORDS[value]
        case list():
            return f"[{', '.join(map(format_literal, value))}]"
        case dict():
            pairs = (f"{format_literal(key)}: {format_literal(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        case _:
            return json.dumps(value, ensure_ascii=False)


class PythonLiteralRules:
    """Adds rules for the values of one tool's parameters to a grammar."""

    def __init__(self, rules: RuleWriter, root: ParameterSchema, prefix: str, *, is_strict: bool) -> None:
        """The names of the new rules begin with `prefix`. `is_strict`: every schema keyword must be enforced."""
        self._rules, self._root, self._prefix = rules, root, prefix
        self._is_strict = is_strict
        self._guidance = {"x-guidance": {"lenient": not is_strict}}
        self._names: dict[str, str] = {}  # of rules, by the JSON of their schema

    def can_enforce(self, schema: object) -> bool:
        """Return whether the rules enforce every keyword of the schema, and of all schemas in it."""
        try:
            return self._can_enforce(schema, set())
        except RecursionError:  # nested too deeply
            return False

    def write_value(self, schema: object) -> str:
        """Return the name of a rule that matches the values of a schema that the rules can enforce."""
        schema = schema if isinstance(schema, dict) else {}
        key = json.dumps(schema, sort_keys=True)
        if (name := self._names.get(key)) is None:
            # The name is known before the expression is made, so a schema may refer to itself.
            name = self._names[key] = f"{self._prefix}_v{len(self._names)}"
            alternatives = enumerate(self._root.alternatives(schema))
            terms = [self._write_alternative(each, f"{name}_{i}") for i, each in alternatives]
            self._rules.add_rule(name, " | ".join(dict.fromkeys(terms)))
        return name

    def write_any(self) -> str:
        """Return the name of a rule that matches any literal."""
        types = ("string", "number", "boolean", "null", "array", "object")
        return self.write_value({"anyOf": [{"type": each} for each in types]})

    def _can_enforce(self, schema: object, checked: set[str]) -> bool:
        if schema is True:
            return True
        if not isinstance(schema, dict) or (key := json.dumps(schema, sort_keys=True)) in checked:
            return isinstance(schema, dict)
        checked.add(key)
        keywords = schema.keys() - _ANNOTATIONS
        if "oneOf" in keywords:
            return False
        if keywords & _CHOICES:
            reference, choices = schema.get("$ref", "#/"), schema.get("anyOf", [])
            if len(keywords) > 1 or not str(reference).startswith("#/") or not isinstance(choices, list):
                return False
            nested = [self._root.resolve(schema)] if "$ref" in schema else choices
            return all(self._can_enforce(each, checked) for each in nested)
        return all(self._can_enforce_type(each, keywords, checked) for each in self._root.alternatives(schema))

    def _can_enforce_type(self, schema: Schema, keywords: set[str], checked: set[str]) -> bool:
        if (values := self._root.list_values(schema, schema)) is not None:
            return bool(values)
        match schema.get("type"):
            case "string" | "number" | "integer":
                return True
            case "boolean" | "null":
                return not keywords & {"allOf", "not", "if"}
            case "array":
                return keywords <= _NESTING and self._can_enforce(schema.get("items", True), checked)
            case "object":
                properties, required = schema.get("properties", {}), schema.get("required", [])
                if not keywords <= _NESTING or not isinstance(properties, dict) or not isinstance(required, list):
                    return False
                if not all(isinstance(name, str) and name in properties for name in required):
                    return False
                if self._is_strict and properties and schema.get("additionalProperties") is not False:
                    return False  # the name of another property may be that of a listed one
                others = schema.get("additionalProperties", True) or True
                return all(self._can_enforce(each, checked) for each in (others, *properties.values()))
            case _:
                return not keywords

    def _write_alternative(self, schema: Schema, name: str) -> str:
        if (values := self._root.list_values(schema, schema)) is not None:
            return " | ".join(self._rules.literal(format_literal(value)) for value in values)
        match schema.get("type"):
            case "string" | "number" | "integer":
                return self._rules.add_schema(name, {**schema, **self._guidance})
            case "boolean":
                return BOOLEAN_RULE
            case "null":
                return NULL_RULE
            case "array":
                item = self.write_value(schema.get("items", {}))
                return f'"[" ({item} (", " {item})*)? "]"'
            case "object":
                return f'"{{" {self._write_properties(schema, name)} "}}"'
            case _:
                return self.write_any()

    def _write_properties(self, schema: Schema, rule_name: str) -> str:
        more, required = schema.get("additionalProperties", True), schema.get("required", [])
        key = self.write_value({"type": "string"})
        other = None if more is False else f'{key} ": " {self.write_value(more)}'
        properties: dict[str, Any] = schema.get("properties", {})
        if not properties:
            return "" if other is None else f'({other} (", " {other})*)?'
        items = []
        for name, each in properties.items():
            term = f"{self._rules.literal(format_literal(name) + ': ')} {self.write_value(each)}"
            items.append((term, name in required))
        return self._rules.write_sequence(rule_name, items, ", ", other)
