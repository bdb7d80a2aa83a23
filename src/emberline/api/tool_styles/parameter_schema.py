"""Reads from a tool's JSON schema which parameters the tool has, and which JSON types their values may have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from emberline.api.call import Tool
from emberline.core.json_schema import SchemaChecker

Schema = dict[str, Any]

MAX_REFERENCES = 16  # that are followed to one schema
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


@dataclass(frozen=True, slots=True)
class ToolParameter:
    name: str
    schema: Schema
    is_required: bool


class ParameterSchema:
    def __init__(self, tool: Tool | None) -> None:
        """`tool` is None if the model calls a tool that the request does not have."""
        self._root: Schema = tool.parameters if tool is not None else {}
        self._checker = SchemaChecker(self._root)
        self.top = self.resolve(self._root)
        properties = self.top.get("properties")
        self._properties: Schema = properties if isinstance(properties, dict) else {}

    @property
    def definitions(self) -> Schema:
        """The parts of the schema to which references point."""
        return {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}

    def list_parameters(self) -> list[ToolParameter]:
        """Return the parameters in the order of the schema."""
        required = self.top.get("required")
        needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        names = dict.fromkeys((*self._properties, *needed))
        return [ToolParameter(name, _as_schema(self._properties.get(name)), name in needed) for name in names]

    def resolve(self, schema: Any) -> Schema:
        """Return the schema to which `schema` refers, or `schema` itself if it is no reference."""
        for _ in range(MAX_REFERENCES):
            schema = _as_schema(schema)
            reference = schema.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            schema = self._root
            for part in reference[2:].split("/"):
                schema = _as_schema(schema).get(part.replace("~1", "/").replace("~0", "~"))
        return _as_schema(schema)

    def alternatives(self, schema: Any, depth: int = 0) -> Iterator[Schema]:
        """Yield alternative schemas: a value must satisfy one of them. Each schema has at most one type."""
        resolved = self.resolve(schema)
        nested = next((resolved[key] for key in ("anyOf", "oneOf") if isinstance(resolved.get(key), list)), None)
        if nested is not None and depth < MAX_REFERENCES:
            for each in nested:
                yield from self.alternatives(each, depth + 1)
        elif isinstance(types := resolved.get("type"), list):
            yield from ({**resolved, "type": type_} for type_ in types)
        else:
            yield resolved

    def list_values(self, alternative: Schema, schema: Any) -> list[Any] | None:
        """Return the only values of an alternative that match the whole schema; None if it does not list values."""
        values = alternative.get("enum")
        if not isinstance(values, list) or not values:
            values = [alternative["const"]] if "const" in alternative else None
        return None if values is None else self._checker.list_matching(values, schema)

    def to_json(self, name: str, text: str) -> str:
        """Return the JSON of a parameter's value that the model wrote as plain text.

        A parameter that may be a string stays a string unless the text is a value of one of its other types that
        matches the schema. Other parameters are read as JSON, and as a string if they are not JSON.
        """
        types = self._types(name)
        value = _parse_json(text.strip(), allows_infinity="number" in types)
        if value is not None and ("string" not in types or self._is_other_value(name, types, json.loads(value))):
            return value
        return json.dumps(text, ensure_ascii=False)

    def _is_other_value(self, name: str, types: set[str], value: Any) -> bool:
        """Return whether the value has a type of the parameter other than string, and matches its schema."""
        has_other_type = bool(types & _types_of(value) - {"string"})
        return has_other_type and bool(self._checker.list_matching([value], self._properties.get(name)))

    def is_string(self, name: str) -> bool:
        """Return whether the parameter can only be a string."""
        return self._types(name) == {"string"}

    def _types(self, name: str) -> set[str]:
        """Return the JSON types that the parameter's value may have; no types if the schema does not restrict them."""
        types: set[str] = set()
        for schema in self.alternatives(self._properties.get(name, {})):
            if isinstance(type_ := schema.get("type"), str):
                types.add(type_)
            elif isinstance(values := schema.get("enum"), list):
                types |= {type_ for value in values for type_ in _types_of(value)}
            elif "const" in schema:
                types |= _types_of(schema["const"])
            else:
                return set()
        return types


def _as_schema(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}


def _parse_json(text: str, allows_infinity: bool) -> str | None:
    """Return the text if it is JSON, with words such as True in JSON's spelling; None if it is not JSON.

    `allows_infinity`: whether a number may be too large for a float."""
    text = _WORDS.get(text.lower(), text)
    try:
        value = json.loads(text, parse_constant=_reject_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    return text if allows_infinity or not is_infinite else None


def _reject_constant(name: str) -> None:
    raise ValueError(name)


def _types_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}
