"""Restricts JSON schemas to the keywords that a provider accepts.

Dropped keywords are reported, because the model is then less constrained than requested. Gemini also has its own schema
format (OpenAPI, with types in capitals); `from_gemini_schema` converts it to JSON Schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emberline.gateway.dialects.inner import Json

# Accepted keywords; the providers reject or ignore all others.
_COMMON = {
    "$defs",
    "$ref",
    "type",
    "format",
    "title",
    "description",
    "enum",
    "items",
    "anyOf",
    "properties",
    "required",
}
GEMINI = frozenset(
    _COMMON
    | {"$id", "$anchor", "prefixItems", "minItems", "maxItems", "minimum", "maximum", "oneOf", "additionalProperties"}
    | {"propertyOrdering"}
)
ANTHROPIC = frozenset(_COMMON | {"const", "allOf", "default", "minItems", "pattern", "additionalProperties"})

_MAPS = ("properties", "$defs", "definitions", "patternProperties")  # name -> schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")

Drop = Callable[[str], None]


def restricted(schema: Any, known: frozenset[str], on_drop: Drop) -> Any:
    """Return `schema` with the `known` keywords only; call `on_drop` with each keyword that is removed."""
    if not isinstance(schema, dict):
        return schema
    result: Json = {}
    for keyword, value in _respelled(schema, known).items():
        if keyword not in known:
            if keyword not in ("$schema", "$comment", "examples"):  # these constrain nothing
                on_drop(keyword)
        elif keyword in _MAPS and isinstance(value, dict):
            result[keyword] = {name: restricted(inner, known, on_drop) for name, inner in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            result[keyword] = [restricted(inner, known, on_drop) for inner in value]
        elif keyword in _SINGLE:
            result[keyword] = restricted(value, known, on_drop)
        else:
            result[keyword] = value
    return result


def _respelled(schema: Json, known: frozenset[str]) -> Json:
    """Replace keywords that have an equivalent among the known ones."""
    result = dict(schema)
    if "const" in result and "const" not in known:
        result.setdefault("enum", [result.pop("const")])
    if "oneOf" in result and "oneOf" not in known and "anyOf" not in result:
        result["anyOf"] = result.pop("oneOf")
    if "definitions" in result and "$defs" not in result:
        result["$defs"] = result.pop("definitions")
        result = _repointed(result)
    all_of = result.get("allOf")
    if "allOf" not in known and isinstance(all_of, list) and len(all_of) == 1 and isinstance(all_of[0], dict):
        del result["allOf"]
        result = {**all_of[0], **result}
    return result


def _repointed(value: Any) -> Any:
    if isinstance(value, list):
        return [_repointed(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    result = {name: _repointed(inner) for name, inner in value.items()}
    if isinstance(result.get("$ref"), str):
        result["$ref"] = result["$ref"].replace("#/definitions/", "#/$defs/")
    return result


def closed(schema: Any, on_change: Drop) -> Any:
    """Set additionalProperties to false on every object; call `on_change` for each change."""
    if isinstance(schema, list):
        return [closed(inner, on_change) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    result: Json = {}
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            result[keyword] = {name: closed(inner, on_change) for name, inner in value.items()}
        else:
            result[keyword] = closed(value, on_change) if keyword in (*_LISTS, *_SINGLE) else value
    if result.get("type") == "object" and result.get("additionalProperties") is not False:
        result["additionalProperties"] = False
        on_change("additionalProperties")
    return result


def is_exact(schema: Any) -> bool:
    """Return whether OpenAI accepts the schema as strict: all properties required, no others allowed."""
    if isinstance(schema, list):
        return all(map(is_exact, schema))
    if not isinstance(schema, dict):
        return True
    inner = [value for keyword in _MAPS if isinstance(schema.get(keyword), dict) for value in schema[keyword].values()]
    inner += [schema[keyword] for keyword in (*_LISTS, *_SINGLE) if keyword in schema]
    names = schema.get("properties", {}).keys()
    is_object = schema.get("type") == "object"
    open_or_partial = schema.get("additionalProperties") is not False or names - set(schema.get("required", ()))
    return not (is_object and open_or_partial) and all(map(is_exact, inner))


def from_gemini(schema: Any) -> Any:
    """Convert Gemini's OpenAPI schema (types in capitals, `nullable`, counts as strings) to JSON Schema."""
    if isinstance(schema, list):
        return [from_gemini(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    result: Json = {}
    for keyword, value in schema.items():
        if keyword == "type" and isinstance(value, str):
            result[keyword] = value.lower()
        elif keyword in _MAPS and isinstance(value, dict):
            result[keyword] = {name: from_gemini(inner) for name, inner in value.items()}
        elif keyword in (*_LISTS, *_SINGLE):
            result[keyword] = from_gemini(value)
        elif keyword.startswith(("min", "max")) and isinstance(value, str) and value.isdigit():
            result[keyword] = int(value)
        elif keyword not in ("nullable", "propertyOrdering", "example"):
            result[keyword] = value
    if schema.get("nullable") is True and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    return result
