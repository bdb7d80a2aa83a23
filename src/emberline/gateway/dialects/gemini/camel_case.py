"""Converts a Gemini request's field names to camelCase; clients may also send snake_case."""

from __future__ import annotations

import re
from typing import Any

_CALLER_DATA_FIELDS = frozenset(
    {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"}
)
_UNDERSCORE = re.compile(r"_([a-z])")


def to_camel_case(value: Any) -> Any:
    """Return the JSON with field names in camelCase, but tool arguments, results and schemas unchanged."""
    if isinstance(value, list):
        return [to_camel_case(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for name, inner in value.items():
        name = _UNDERSCORE.sub(lambda match: match[1].upper(), name)
        result[name] = inner if name in _CALLER_DATA_FIELDS else to_camel_case(inner)
    return result
