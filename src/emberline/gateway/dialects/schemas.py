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


def restricted(schema: Any, known: frozenset[str], drop: Drop) -> Any:
    """`schema` in known words only; `drop` hears of each other one."""
    if not isinstance(schema, dict):
        return schema
    made: Json = {}
    for word, value in _respelled(schema, known).items():
        if word not in known:
            if word not in ("$schema", "$comment", "examples"):  # which ask for nothing
                drop(word)
        elif word in _MAPS and isinstance(value, dict):
            made[word] = {name: restricted(inner, known, drop) for name, inner in value.items()}
        elif word in _LISTS and isinstance(value, list):
            made[word] = [restricted(inner, known, drop) for inner in value]
        elif word in _SINGLE:
            made[word] = restricted(value, known, drop)
        else:
            made[word] = value
    return made


def _respelled(schema: Json, known: frozenset[str]) -> Json:
    """Words that can be said by known ones."""
    made = dict(schema)
    if "const" in made and "const" not in known:
        made.setdefault("enum", [made.pop("const")])
    if "oneOf" in made and "oneOf" not in known and "anyOf" not in made:
        made["anyOf"] = made.pop("oneOf")
    if "definitions" in made and "$defs" not in made:
        made["$defs"] = made.pop("definitions")
        made = _repointed(made)
    whole = made.get("allOf")
    if "allOf" not in known and isinstance(whole, list) and len(whole) == 1 and isinstance(whole[0], dict):
        del made["allOf"]
        made = {**whole[0], **made}
    return made


def _repointed(value: Any) -> Any:
    if isinstance(value, list):
        return [_repointed(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    made = {name: _repointed(inner) for name, inner in value.items()}
    if isinstance(made.get("$ref"), str):
        made["$ref"] = made["$ref"].replace("#/definitions/", "#/$defs/")
    return made


def closed(schema: Any, note: Drop) -> Any:
    """Every object says that it has no other properties, as Anthropic wants it of formats; `note` hears of changes."""
    if isinstance(schema, list):
        return [closed(inner, note) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made: Json = {}
    for word, value in schema.items():
        if word in _MAPS and isinstance(value, dict):
            made[word] = {name: closed(inner, note) for name, inner in value.items()}
        else:
            made[word] = closed(value, note) if word in (*_LISTS, *_SINGLE) else value
    if made.get("type") == "object" and made.get("additionalProperties") is not False:
        made["additionalProperties"] = False
        note("additionalProperties")
    return made


def is_exact(schema: Any) -> bool:
    """Whether every object says that it has all its properties and no others, as OpenAI wants it of strict tools."""
    if isinstance(schema, list):
        return all(map(is_exact, schema))
    if not isinstance(schema, dict):
        return True
    inner = [value for word in _MAPS if isinstance(schema.get(word), dict) for value in schema[word].values()]
    inner += [schema[word] for word in (*_LISTS, *_SINGLE) if word in schema]
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
    made: Json = {}
    for word, value in schema.items():
        if word == "type" and isinstance(value, str):
            made[word] = value.lower()
        elif word in _MAPS and isinstance(value, dict):
            made[word] = {name: from_gemini(inner) for name, inner in value.items()}
        elif word in (*_LISTS, *_SINGLE):
            made[word] = from_gemini(value)
        elif word.startswith(("min", "max")) and isinstance(value, str) and value.isdigit():
            made[word] = int(value)
        elif word not in ("nullable", "propertyOrdering", "example"):
            made[word] = value
    if schema.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made
