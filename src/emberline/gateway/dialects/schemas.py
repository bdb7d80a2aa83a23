"""Restricts JSON schemas to the keywords that a provider accepts.

Dropped keywords are reported, because the output is then less constrained than requested. Gemini also has its own
schema format (OpenAPI, with types in capitals); `from_gemini_schema` converts it to JSON Schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emberline.gateway.dialects.canonical import Json

# Accepted keywords; the providers reject or ignore all others.
_COMMON_KEYWORDS = {
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
GEMINI_KEYWORDS = frozenset(
    _COMMON_KEYWORDS
    | {"$id", "$anchor", "prefixItems", "minItems", "maxItems", "minimum", "maximum", "oneOf", "additionalProperties"}
    | {"propertyOrdering"}
)
ANTHROPIC_KEYWORDS = frozenset(
    _COMMON_KEYWORDS | {"const", "allOf", "default", "minItems", "pattern", "additionalProperties"}
)

_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")  # name -> schema
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE_SCHEMAS = ("items", "additionalProperties", "not")

KeywordCallback = Callable[[str], None]


def restrict_keywords(schema: Any, known_keywords: frozenset[str], on_drop: KeywordCallback) -> Any:
    """Return `schema` with only its known keywords, and call `on_drop` for each removed keyword."""
    if not isinstance(schema, dict):
        return schema
    result: Json = {}
    for keyword, value in _rewrite_keywords(schema, known_keywords).items():
        if keyword not in known_keywords:
            if keyword not in ("$schema", "$comment", "examples"):  # these constrain nothing
                on_drop(keyword)
        elif keyword in _SCHEMA_MAPS and isinstance(value, dict):
            result[keyword] = {name: restrict_keywords(inner, known_keywords, on_drop) for name, inner in value.items()}
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            result[keyword] = [restrict_keywords(inner, known_keywords, on_drop) for inner in value]
        elif keyword in _SINGLE_SCHEMAS:
            result[keyword] = restrict_keywords(value, known_keywords, on_drop)
        else:
            result[keyword] = value
    return result


def _rewrite_keywords(schema: Json, known_keywords: frozenset[str]) -> Json:
    """Replace each unknown keyword that has an equivalent among the known keywords."""
    result = dict(schema)
    if "const" in result and "const" not in known_keywords:
        result.setdefault("enum", [result.pop("const")])
    if "oneOf" in result and "oneOf" not in known_keywords and "anyOf" not in result:
        result["anyOf"] = result.pop("oneOf")
    if "definitions" in result and "$defs" not in result:
        result["$defs"] = result.pop("definitions")
        result = _rewrite_references(result)
    all_of = result.get("allOf")
    if "allOf" not in known_keywords and isinstance(all_of, list) and len(all_of) == 1 and isinstance(all_of[0], dict):
        del result["allOf"]
        result = {**all_of[0], **result}
    return result


def _rewrite_references(value: Any) -> Any:
    if isinstance(value, list):
        return [_rewrite_references(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    result = {name: _rewrite_references(inner) for name, inner in value.items()}
    if isinstance(result.get("$ref"), str):
        result["$ref"] = result["$ref"].replace("#/definitions/", "#/$defs/")
    return result


def forbid_additional_properties(schema: Any, on_change: KeywordCallback) -> Any:
    """Set additionalProperties to false in every object schema, and call `on_change` for each change."""
    if isinstance(schema, list):
        return [forbid_additional_properties(inner, on_change) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    result: Json = {}
    for keyword, value in schema.items():
        if keyword in _SCHEMA_MAPS and isinstance(value, dict):
            result[keyword] = {name: forbid_additional_properties(inner, on_change) for name, inner in value.items()}
        else:
            result[keyword] = (
                forbid_additional_properties(value, on_change)
                if keyword in (*_SCHEMA_LISTS, *_SINGLE_SCHEMAS)
                else value
            )
    if result.get("type") == "object" and result.get("additionalProperties") is not False:
        result["additionalProperties"] = False
        on_change("additionalProperties")
    return result


def is_strict_schema(schema: Any) -> bool:
    """Return whether OpenAI accepts the schema as strict: all properties required, no additional ones."""
    if isinstance(schema, list):
        return all(map(is_strict_schema, schema))
    if not isinstance(schema, dict):
        return True
    inner = [
        value for keyword in _SCHEMA_MAPS if isinstance(schema.get(keyword), dict) for value in schema[keyword].values()
    ]
    inner += [schema[keyword] for keyword in (*_SCHEMA_LISTS, *_SINGLE_SCHEMAS) if keyword in schema]
    names = schema.get("properties", {}).keys()
    is_object = schema.get("type") == "object"
    open_or_partial = schema.get("additionalProperties") is not False or names - set(schema.get("required", ()))
    return not (is_object and open_or_partial) and all(map(is_strict_schema, inner))


def from_gemini_schema(schema: Any) -> Any:
    """Convert Gemini's OpenAPI schema (types in capitals, `nullable`, counts as strings) to JSON Schema."""
    if isinstance(schema, list):
        return [from_gemini_schema(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    result: Json = {}
    for keyword, value in schema.items():
        if keyword == "type" and isinstance(value, str):
            result[keyword] = value.lower()
        elif keyword in _SCHEMA_MAPS and isinstance(value, dict):
            result[keyword] = {name: from_gemini_schema(inner) for name, inner in value.items()}
        elif keyword in (*_SCHEMA_LISTS, *_SINGLE_SCHEMAS):
            result[keyword] = from_gemini_schema(value)
        elif keyword.startswith(("min", "max")) and isinstance(value, str) and value.isdigit():
            result[keyword] = int(value)
        elif keyword not in ("nullable", "propertyOrdering", "example"):
            result[keyword] = value
    if schema.get("nullable") is True and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    return result
