"""SchemaChecker: checks a JSON value against a JSON schema, in a limited number of steps.

It reads the keywords of drafts 4 to 2020-12, except `unevaluated...`, `$dynamicRef` and references to other documents.
Patterns are RE2's, so the time of a match is linear. Schemas and values may be hostile.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Hashable, Iterator
from datetime import date
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from emberline.core.linear_regex import compile_linear_regex

Schema = dict[str, Any]
Violation = bool | str | None

MAX_CHECK_STEPS = 20_000  # about 30 ms; a step applies one schema to one value
MAX_REFERENCES = 16  # from one schema to the next without a keyword between them
# Keywords by what their value holds: schemas by name, a list of schemas, or one schema.
MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE_KEYWORDS = (
    "items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else",
)  # fmt: skip
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "id", "$anchor",
    "deprecated", "readOnly", "writeOnly", "$defs", "definitions", "contentEncoding", "contentMediaType",
})  # fmt: skip
_UNCHECKED = ("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef")
_OLD_DRAFT = re.compile(r"draft-0[3467]/")
_UNICODE_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)


class UncheckableSchema(ValueError):
    """The schema has a keyword that SchemaChecker cannot check; the message names it."""


class _TooManySteps(Exception):
    pass


class SchemaChecker:
    def __init__(self, schema: Schema) -> None:
        self._root = schema
        self._steps = 0
        self._patterns: dict[str, Any] = {}
        self._enums: dict[int, frozenset[Hashable]] = {}  # by the id of the schema
        self._reads_only_reference = reads_only_reference(schema)

    def ensure_checkable(self) -> None:
        """Raise UncheckableSchema if a part of the schema cannot be checked."""
        for each in iterate_schemas(self._root):
            _refuse_unchecked(each)
            resolve_reference(self._root, each)
            for pattern in (each.get("pattern"), *_as_dict(each.get("patternProperties"))):
                if isinstance(pattern, str):
                    self._find_pattern(pattern)

    def find_violation(self, text: str) -> str | None:
        """Return which keyword the JSON text violates and where, such as `uniqueItems at /tags`; None if none."""
        try:
            value = json.loads(text, parse_float=Decimal)
            self._steps = 0
            return self._violation(self._root, value, "")
        except RecursionError:
            return "the value is nested too deeply to check it"
        except _TooManySteps:
            return f"checking the value takes more than {MAX_CHECK_STEPS} steps"
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            return f"the value cannot be checked: {type(error).__name__}"  # an odd number, or a malformed keyword

    def list_matching(self, values: list[Any], part: Any) -> list[Any]:
        """Return the values that match a part of the schema, or all of them if that cannot be checked."""
        self._steps = 0
        try:
            return [value for value in values if self._is_valid(part, value)]
        except (_TooManySteps, RecursionError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            return values

    def _is_valid(self, schema: Any, value: Any) -> bool:
        return self._violation(schema, value, "") is None

    def _find_pattern(self, pattern: str) -> Any:
        if pattern not in self._patterns:
            self._patterns[pattern] = _compile_pattern(pattern)
        return self._patterns[pattern]

    def _violation(self, schema: Any, value: Any, path: str) -> str | None:
        self._steps += 1
        if self._steps > MAX_CHECK_STEPS:
            raise _TooManySteps
        if schema is False:
            return f"no value is allowed at {path or '/'}"
        if not isinstance(schema, dict):
            return None
        _refuse_unchecked(schema)
        if "$ref" in schema:
            nested = self._violation(resolve_reference(self._root, schema), value, path)
            if nested or self._reads_only_reference:
                return nested
        for keyword in schema:
            if (check := _CHECKS.get(keyword)) and (found := check(self, schema, value, path)):
                return found if isinstance(found, str) else f"{keyword} at {path or '/'}"
        return None

    # -- each method checks one keyword: it returns whether the value violates it, or the violation in a nested value

    def _violates_type(self, schema: Schema, value: Any, path: str) -> Violation:
        types = schema["type"]
        types = types if isinstance(types, list) else [types]
        return not any(has_type(value, each) for each in types)

    def _violates_enum(self, schema: Schema, value: Any, path: str) -> Violation:
        if (values := self._enums.get(id(schema))) is None:
            values = self._enums[id(schema)] = frozenset(map(comparable, schema["enum"]))
            self._steps += len(values)
        return comparable(value) not in values

    def _violates_const(self, schema: Schema, value: Any, path: str) -> Violation:
        return comparable(value) != comparable(schema["const"])

    def _violates_all_of(self, schema: Schema, value: Any, path: str) -> Violation:
        return next((found for each in schema["allOf"] if (found := self._violation(each, value, path))), None)

    def _violates_any_of(self, schema: Schema, value: Any, path: str) -> Violation:
        return not any(self._is_valid(each, value) for each in schema["anyOf"])

    def _violates_one_of(self, schema: Schema, value: Any, path: str) -> Violation:
        return sum(self._is_valid(each, value) for each in schema["oneOf"]) != 1

    def _violates_not(self, schema: Schema, value: Any, path: str) -> Violation:
        return self._is_valid(schema["not"], value)

    def _violates_if(self, schema: Schema, value: Any, path: str) -> Violation:
        branch = "then" if self._is_valid(schema["if"], value) else "else"
        return self._violation(schema.get(branch, True), value, path)

    def _violates_minimum(self, schema: Schema, value: Any, path: str) -> Violation:
        limit, is_open = schema["minimum"], schema.get("exclusiveMinimum") is True
        return _is_number(value) and (value <= _decimal(limit) if is_open else value < _decimal(limit))

    def _violates_maximum(self, schema: Schema, value: Any, path: str) -> Violation:
        limit, is_open = schema["maximum"], schema.get("exclusiveMaximum") is True
        return _is_number(value) and (value >= _decimal(limit) if is_open else value > _decimal(limit))

    def _violates_exclusive_minimum(self, schema: Schema, value: Any, path: str) -> Violation:
        limit = schema["exclusiveMinimum"]
        return _is_number(value) and _is_number(limit) and value <= _decimal(limit)

    def _violates_exclusive_maximum(self, schema: Schema, value: Any, path: str) -> Violation:
        limit = schema["exclusiveMaximum"]
        return _is_number(value) and _is_number(limit) and value >= _decimal(limit)

    def _violates_multiple_of(self, schema: Schema, value: Any, path: str) -> Violation:
        return _is_number(value) and Decimal(value) % _decimal(schema["multipleOf"]) != 0

    def _violates_min_length(self, schema: Schema, value: Any, path: str) -> Violation:
        return isinstance(value, str) and len(value) < schema["minLength"]

    def _violates_max_length(self, schema: Schema, value: Any, path: str) -> Violation:
        return isinstance(value, str) and len(value) > schema["maxLength"]

    def _violates_pattern(self, schema: Schema, value: Any, path: str) -> Violation:
        return isinstance(value, str) and not self._find_pattern(schema["pattern"]).search(value)

    def _violates_format(self, schema: Schema, value: Any, path: str) -> Violation:
        check = _FORMATS.get(schema["format"]) if isinstance(value, str) else None
        return check is not None and not check(value)

    def _violates_items(self, schema: Schema, value: Any, path: str) -> Violation:
        """Check prefixItems, items in all its forms and additionalItems."""
        if not isinstance(value, list):
            return None
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        for i, item in enumerate(value):
            if found := self._violation(first[i] if i < len(first) else rest, item, f"{path}/{i}"):
                return found
        return None

    def _violates_min_items(self, schema: Schema, value: Any, path: str) -> Violation:
        return isinstance(value, list) and len(value) < schema["minItems"]

    def _violates_max_items(self, schema: Schema, value: Any, path: str) -> Violation:
        return isinstance(value, list) and len(value) > schema["maxItems"]

    def _violates_unique_items(self, schema: Schema, value: Any, path: str) -> Violation:
        if schema["uniqueItems"] is not True or not isinstance(value, list):
            return None
        return len(set(map(comparable, value))) < len(value)

    def _violates_contains(self, schema: Schema, value: Any, path: str) -> Violation:
        if not isinstance(value, list):
            return None
        count = sum(self._is_valid(schema["contains"], item) for item in value)
        is_within = schema.get("minContains", 1) <= count <= schema.get("maxContains", count)
        return not is_within

    def _violates_properties(self, schema: Schema, value: Any, path: str) -> Violation:
        """Check properties, patternProperties and additionalProperties."""
        if not isinstance(value, dict):
            return None
        listed, patterns = _as_dict(schema.get("properties")), _as_dict(schema.get("patternProperties"))
        for name, each in value.items():
            applied = [nested for pattern, nested in patterns.items() if self._find_pattern(pattern).search(name)]
            if name in listed:
                applied.append(listed[name])
            for nested in applied or [schema.get("additionalProperties", True)]:
                if found := self._violation(nested, each, f"{path}/{name}"):
                    return found
        return None

    def _violates_required(self, schema: Schema, value: Any, path: str) -> Violation:
        names = schema["required"]
        return isinstance(value, dict) and isinstance(names, list) and any(name not in value for name in names)

    def _violates_min_properties(self, schema: Schema, value: Any, path: str) -> Violation:
        return isinstance(value, dict) and len(value) < schema["minProperties"]

    def _violates_max_properties(self, schema: Schema, value: Any, path: str) -> Violation:
        return isinstance(value, dict) and len(value) > schema["maxProperties"]

    def _violates_property_names(self, schema: Schema, value: Any, path: str) -> Violation:
        names = value if isinstance(value, dict) else ()
        return not all(self._is_valid(schema["propertyNames"], name) for name in names)

    def _violates_dependencies(self, schema: Schema, value: Any, path: str) -> Violation:
        if not isinstance(value, dict):
            return None
        for name, needed in list_dependencies(schema):
            if name in value and (found := self._violation(needed, value, path)):
                return found
        return None


def _refuse_unchecked(schema: Schema) -> None:
    if keyword := next((key for key in _UNCHECKED if key in schema), None):
        raise UncheckableSchema(keyword)


def iterate_schemas(schema: Any) -> Iterator[Schema]:
    """Yield the schema and all schemas in it, also those that only references lead to."""
    seen: set[int] = set()
    todo = [schema]
    while todo:
        each = todo.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        for key in MAP_KEYWORDS:
            todo += _as_dict(each.get(key)).values()
        for key in LIST_KEYWORDS:
            todo += each[key] if isinstance(each.get(key), list) else []
        for key in SINGLE_KEYWORDS:
            todo += each[key] if isinstance(each.get(key), list) else [each.get(key)]
        todo += _as_dict(each.get("dependencies")).values()
        reference = each.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            todo.append(follow_pointer(schema, reference))


def follow_pointer(root: Any, reference: str) -> Any:
    """Return what `#/...` points to, or None."""
    found = root
    for part in reference[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def resolve_reference(root: Schema, schema: Any) -> Any:
    """Return the schema to which `schema` refers, or `schema` itself. Raises UncheckableSchema."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return schema
        schema = root if reference == "#" else follow_pointer(root, reference) if reference[:2] == "#/" else None
        if schema is None:
            raise UncheckableSchema(f"$ref {reference[:60]!r}")
        if isinstance(schema, dict) and len(schema.keys() - ANNOTATIONS) > 1:
            return schema
    raise UncheckableSchema("$ref to itself")


def reads_only_reference(root: Schema) -> bool:
    """Return whether the schema's draft ignores keywords beside `$ref`."""
    return _OLD_DRAFT.search(str(root.get("$schema"))) is not None


def list_dependencies(schema: Schema) -> list[tuple[str, Any]]:
    """Return each property on which others depend, with the schema that objects with this property must match."""
    found: list[tuple[str, Any]] = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, needed in _as_dict(schema.get(keyword)).items():
            found.append((name, {"required": needed} if isinstance(needed, list) else needed))
    return found


def has_type(value: Any, type_: Any) -> bool:
    match type_:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return _is_number(value) and (isinstance(value, int) or value == value.to_integral_value())
        case "number":
            return _is_number(value)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    return False


def comparable(value: Any) -> Hashable:
    """Return a hashable value that is equal for equal JSON values only: 1 equals 1.0 but not true."""
    match value:
        case bool():
            return ("boolean", value)
        case list():
            return ("array", tuple(map(comparable, value)))
        case dict():
            return ("object", frozenset((key, comparable(each)) for key, each in value.items()))
        case float():
            return Decimal(str(value))
    hashable: Hashable = value
    return hashable


def _as_dict(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _decimal(number: Any) -> Any:
    return Decimal(str(number)) if isinstance(number, float) else number


def _compile_pattern(pattern: str) -> Any:
    rewritten = _UNICODE_ESCAPE.sub(lambda each: f"\\x{{{each[1]}}}" if each[1] else each[0], pattern)
    try:
        return compile_linear_regex(rewritten)
    except ValueError as error:
        raise UncheckableSchema(f"pattern ({error})") from None


def _matches(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: compiled.fullmatch(text) is not None


def _is_address(kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> Callable[[str], bool]:
    def is_address(text: str) -> bool:
        try:
            kind(text)
        except ValueError:
            return False
        return True

    return is_address


_matches_date = _matches(r"\d{4}-\d\d-\d\d")
_matches_time = _matches(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]\d\d:\d\d)")


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return _matches_date(text)


_FORMATS: dict[Any, Callable[[str], bool]] = {
    "date": _is_date,
    "time": _matches_time,
    "date-time": lambda text: _is_date(text[:10]) and text[10:11] in ("t", "T") and _matches_time(text[11:]),
    "uuid": _matches(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
    "email": _matches(r"[^@\s]+@[^@\s]+"),
    "hostname": _matches(r"(?=.{1,253}\Z)[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?(\.[0-9A-Za-z-]{1,63})*"),
    "uri": _matches(r"[A-Za-z][A-Za-z0-9+.-]*:\S*"),
    "ipv4": _is_address(ipaddress.IPv4Address),
    "ipv6": _is_address(ipaddress.IPv6Address),
}
_CHECKS: dict[str, Callable[[SchemaChecker, Schema, Any, str], Violation]] = {
    "type": SchemaChecker._violates_type,
    "enum": SchemaChecker._violates_enum,
    "const": SchemaChecker._violates_const,
    "allOf": SchemaChecker._violates_all_of,
    "anyOf": SchemaChecker._violates_any_of,
    "oneOf": SchemaChecker._violates_one_of,
    "not": SchemaChecker._violates_not,
    "if": SchemaChecker._violates_if,
    "minimum": SchemaChecker._violates_minimum,
    "maximum": SchemaChecker._violates_maximum,
    "exclusiveMinimum": SchemaChecker._violates_exclusive_minimum,
    "exclusiveMaximum": SchemaChecker._violates_exclusive_maximum,
    "multipleOf": SchemaChecker._violates_multiple_of,
    "minLength": SchemaChecker._violates_min_length,
    "maxLength": SchemaChecker._violates_max_length,
    "pattern": SchemaChecker._violates_pattern,
    "format": SchemaChecker._violates_format,
    "prefixItems": SchemaChecker._violates_items,
    "items": SchemaChecker._violates_items,
    "minItems": SchemaChecker._violates_min_items,
    "maxItems": SchemaChecker._violates_max_items,
    "uniqueItems": SchemaChecker._violates_unique_items,
    "contains": SchemaChecker._violates_contains,
    "properties": SchemaChecker._violates_properties,
    "patternProperties": SchemaChecker._violates_properties,
    "additionalProperties": SchemaChecker._violates_properties,
    "required": SchemaChecker._violates_required,
    "minProperties": SchemaChecker._violates_min_properties,
    "maxProperties": SchemaChecker._violates_max_properties,
    "propertyNames": SchemaChecker._violates_property_names,
    "dependencies": SchemaChecker._violates_dependencies,
    "dependentRequired": SchemaChecker._violates_dependencies,
    "dependentSchemas": SchemaChecker._violates_dependencies,
}
