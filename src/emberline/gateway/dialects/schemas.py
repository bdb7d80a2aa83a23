"""JSON Schemas in the words a provider knows. What is left out is reported: the model is then freer than asked.

Gemini also has schemas of its own (OpenAPI's, with types in capitals); `from_gemini` makes ordinary ones of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emberline.gateway.dialects.inner import Json

# Words that annotate, hold other schemas, or constrain; what is not here is not known to the provider.
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
    """`schema` in known words only; `drop` hears of each other one."""
    if not isinstance(schema, dict):
        return schema
    result: Json = {}
    for keyword, value in _respelled(schema, known).items():
        if keyword not in known:
            if keyword not in ("$schema", "$comment", "examples"):  # which ask for nothing
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
    """Words that can be said by known ones."""
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
    """Every object says that it has no other properties, as Anthropic wants it of formats; `note` hears of changes."""
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
    """Whether every object says that it has all its properties and no others, as OpenAI wants it of strict tools."""
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
    """OpenAPI's manner: capital types, `nullable`, counts as text."""
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
