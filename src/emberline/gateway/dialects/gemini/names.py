"""Field names of Gemini's: its JSON may be written in camelCase, as we do, or in snake_case."""

from __future__ import annotations

import re
from typing import Any

_DATA = frozenset({"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"})
_UNDERSCORE = re.compile(r"_([a-z])")


def camel(value: Any) -> Any:
    """The same with names in camelCase; what is a caller's own data stays as it is."""
    if isinstance(value, list):
        return [camel(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for name, inner in value.items():
        name = _UNDERSCORE.sub(lambda match: match[1].upper(), name)
        result[name] = inner if name in _DATA else camel(inner)
    return result
