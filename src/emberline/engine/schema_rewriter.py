"""rewrite_schema: writes a JSON schema with the keywords that the grammar library can enforce.

Some keywords have an equal form in others: `dependencies`, simple `not`, `if`, and `oneOf` whose members can be made
disjoint. The others are removed and checked when the value is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from emberline.core.json_schema import (
    ANNOTATIONS,
    UncheckableSchema,
    comparable,
    has_type,
    iterate_schemas,
    list_dependencies,
    reads_only_reference,
    resolve_reference,
)

Schema = dict[str, Any]

TYPES = ("null", "boolean", "number", "string", "array", "object")
# The formats that the library enforces; others are annotations, as the standard says.
ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_KEYWORDS_OF_TYPES: tuple[tuple[set[str], set[str]], ...] = (
    ({"number"}, {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    ({"string"}, {"minLength", "maxLength", "pattern", "format"}),
    ({"array"}, {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"}),
    (
        {"object"},
        {"properties", "patternProperties", "additionalProperties", "propertyNames", "minProperties", "maxProperties"},
    ),
)
# February has 29 days in leap years only; most minutes have no second 60; an email address has a limited length.
_DAY = (
    r"^(\d{4}-(0[13-9]|1[0-2])|\d{4}-02-([01]\d|2[0-8])"
    r"|(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_NARROWER_NAMES = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
_NARROWER_FORMATS = {
    "date": _DAY,
    "date-time": _DAY + r".*[Tt]\d\d:\d\d:[0-5]",
    "time": r"^\d\d:\d\d:[0-5]",
    "email": r"^[^@]{1,64}@.{1,180}$",
}
CHECKED_AT_THE_END = ("contains", "minContains", "maxContains")  # always removed
MAX_ALTERNATIVES = 64  # of one schema, by the product of what its dependencies and conditions can be
_SPACE_OR_ESCAPE = re.compile(r"(\\s)|\\.", re.DOTALL)
MAX_ARRANGED_VALUES = 4  # of an array without repetition; 65 arrangements
MAX_DEMANDS = 10_000  # schemas that are read to find out which members of oneOf differ
MAX_NESTED_REFERENCES = 8  # and allOf, that are followed to learn what a schema demands


@dataclass(slots=True)
class RewrittenSchema:
    schema: Schema
    needs_check: bool  # a complete value may still violate the original schema


def rewrite_schema(schema: Schema, *, splits_one_of: bool) -> RewrittenSchema:
    """Return the schema without the keywords that the library does not enforce.

    `splits_one_of`: replace `oneOf` too, which the library enforces only if it finds its members disjoint.
    Raises UncheckableSchema if the schema allows only numbers and needs a check: a number has no last character."""
    rewriter = _SchemaRewriter(deepcopy(schema), splits_one_of)
    rewriter.rewrite_all()
    if rewriter.needs_check:
        rewriter.exclude_numbers()
    return RewrittenSchema(rewriter.root, rewriter.needs_check)


class _SchemaRewriter:
    def __init__(self, root: Schema, splits_one_of: bool) -> None:
        self.root, self.needs_check = root, False
        self._splits_one_of = splits_one_of
        self._num_demands = 0

    def rewrite_all(self) -> None:
        # All are found first: rewriting adds schemas, which need none of it.
        for schema in list(iterate_schemas(self.root)):
            _drop_unknown_format(schema)
            _use_ascii_space(schema)
            _narrow_format(schema)
            extra = [
                *self._rewrite_dependencies(schema),
                *self._rewrite_not(schema),
                *self._rewrite_condition(schema),
                *self._rewrite_property_names(schema),
                *self._rewrite_property_counts(schema),
                *self._rewrite_unique_items(schema),
            ]
            for keyword in CHECKED_AT_THE_END:
                self._leave_to_check(schema, keyword)
            if self._splits_one_of and isinstance(schema.get("oneOf"), list):
                extra.append({"anyOf": self._separate(schema, schema.pop("oneOf"))})
            if extra:
                schema["allOf"] = [*(schema["allOf"] if isinstance(schema.get("allOf"), list) else []), *extra]

    def exclude_numbers(self) -> None:
        types = self._demands(self.root).types
        if types <= {"number"}:
            raise UncheckableSchema("those of a number outside of arrays and objects")
        if "number" in types:
            others = {"type": sorted(types - {"number"})}
            self.root["allOf"] = [*(self.root["allOf"] if isinstance(self.root.get("allOf"), list) else []), others]

    def _leave_to_check(self, schema: Schema, *keywords: str) -> None:
        for keyword in keywords:
            if keyword in schema:
                del schema[keyword]
                self.needs_check = True

    def _rewrite_unique_items(self, schema: Schema) -> list[Schema]:
        """An array of a few values without repetition is one of their arrangements."""
        if schema.get("uniqueItems") is not True or schema.get("maxItems") in (0, 1):
            schema.pop("uniqueItems", None)
            return []
        values = self._list_values(schema.get("items"))
        least, most = schema.get("minItems", 0), schema.get("maxItems", MAX_ARRANGED_VALUES)
        if not values or len(values) > MAX_ARRANGED_VALUES or not isinstance(least, int) or not isinstance(most, int):
            self._leave_to_check(schema, "uniqueItems")
            return []
        for keyword in ("uniqueItems", "items", "minItems", "maxItems"):
            schema.pop(keyword, None)
        sizes = range(least, min(most, len(values)) + 1)
        arrangements = [_array_of(each) for size in sizes for each in permutations(values, size)]
        return [{"anyOf": [{"type": [each for each in TYPES if each != "array"]}, *arrangements]}]

    def _list_values(self, schema: Any) -> list[Any]:
        """Return the values of a schema that is an enum, each once; otherwise none."""
        try:
            schema = resolve_reference(self.root, schema)
        except UncheckableSchema:
            return []
        if not isinstance(schema, dict) or schema.keys() - ANNOTATIONS - {"type", "enum"}:
            return []
        values = schema.get("enum")
        if not isinstance(values, list):
            return []
        fitting = [value for value in values if _fits_type(value, schema.get("type", list(TYPES)))]
        return list({comparable(value): value for value in fitting}.values())

    def _rewrite_dependencies(self, schema: Schema) -> list[Schema]:
        """A dependency means: the property is absent, or the object matches what depends on it."""
        try:
            found = list_dependencies(schema)
        except (TypeError, AttributeError):
            found = []
        keywords = ("dependencies", "dependentRequired", "dependentSchemas")
        if 2 ** len(found) > MAX_ALTERNATIVES:
            self._leave_to_check(schema, *keywords)
            return []
        for keyword in keywords:
            schema.pop(keyword, None)
        return [{"anyOf": [_forbid([name]), {"allOf": [needed, {"required": [name]}]}]} for name, needed in found]

    def _rewrite_not(self, schema: Schema) -> list[Any]:
        if "not" not in schema:
            return []
        negated = _negate(schema["not"])
        if negated is None:
            self._leave_to_check(schema, "not")
            return []
        del schema["not"]
        return [negated]

    def _rewrite_condition(self, schema: Schema) -> list[Schema]:
        condition, then, other = (schema.get(key, True) for key in ("if", "then", "else"))
        if "if" not in schema or (then is True and other is True):
            for keyword in ("if", "then", "else"):
                schema.pop(keyword, None)
            return []
        negated = _negate(condition)
        if negated is None:
            self._leave_to_check(schema, "if", "then", "else")
            return []
        for keyword in ("if", "then", "else"):
            schema.pop(keyword, None)
        return [{"anyOf": [{"allOf": [condition, then]}, {"allOf": [negated, other]}]}]

    def _rewrite_property_names(self, schema: Schema) -> list[Schema]:
        names = schema.get("propertyNames")
        if isinstance(names, dict) and not (names.keys() - ANNOTATIONS - {"type"}) and "type" in names:
            if names["type"] == "string":
                del schema["propertyNames"]
        elif (
            isinstance(names, dict)
            and not (names.keys() - ANNOTATIONS - {"type", "pattern"})
            and isinstance(names.get("pattern"), str)
            and not (schema.keys() & {"properties", "patternProperties"})
        ):
            others = schema.pop("additionalProperties", True)
            del schema["propertyNames"]
            schema["patternProperties"] = {names["pattern"]: others}
            schema["additionalProperties"] = False
        self._leave_to_check(schema, "propertyNames")
        return []

    def _rewrite_property_counts(self, schema: Schema) -> list[Schema]:
        """The library counts properties only if all that are listed are required."""
        listed, required = _as_dict(schema.get("properties")), _required_names(schema)
        if listed.keys() <= required and "patternProperties" not in schema:
            # The library counts a name that the model writes twice as two properties.
            self.needs_check |= "minProperties" in schema and schema.get("additionalProperties") is not False
            return []
        least = schema.get("minProperties")
        if isinstance(least, int) and least <= len(required):
            del schema["minProperties"]
        elif least == 1 and 0 < len(listed) <= MAX_ALTERNATIVES // 2:
            del schema["minProperties"]
            self._leave_to_check(schema, "maxProperties")
            return [{"anyOf": [{"required": [name]} for name in listed]}]
        if schema.get("additionalProperties") is False and "patternProperties" not in schema:
            most = schema.get("maxProperties")
            if isinstance(most, int) and most >= len(listed):
                del schema["maxProperties"]
        self._leave_to_check(schema, "minProperties", "maxProperties")
        return []

    # -- oneOf

    def _separate(self, parent: Schema, members: list[Any]) -> list[Any]:
        """Return the members, restricted so that a value matches only one of them, as far as that is possible.

        A member whose values all match another one is left out."""
        shared = self._demands({key: value for key, value in parent.items() if key not in ("anyOf", "allOf")})
        demands = [self._demands(member) for member in members]
        separated = []
        for i, member in enumerate(members):
            others = [each for k, each in enumerate(demands) if k != i]
            if any(each.is_implied_by(demands[i], shared) for each in others):
                continue
            restriction = _Restriction(demands[i], shared)
            for other in others:
                if not restriction.exclude(other):
                    self.needs_check = True
            if restriction.types:
                separated.append(restriction.apply_to(member))
        if not separated:
            self.needs_check = True
            return members
        return separated

    def _demands(self, schema: Any, depth: int = 0) -> _Demands:
        """Return what every value of the schema must satisfy, as far as it is simple."""
        demands = _Demands()
        self._num_demands += 1
        if schema is False:
            demands.types = set()
        elif self._num_demands > MAX_DEMANDS:
            demands.free_types = set()
        if not isinstance(schema, dict) or self._num_demands > MAX_DEMANDS:
            return demands
        if "$ref" in schema:
            try:
                target = resolve_reference(self.root, schema)
            except UncheckableSchema:
                target = None
            if depth < MAX_NESTED_REFERENCES and target is not None:
                demands.add(self._demands(target, depth + 1))
            else:
                demands.free_types = set()
            if reads_only_reference(self.root):
                return demands
        if isinstance(schema.get("allOf"), list):
            for each in schema["allOf"]:
                if depth < MAX_NESTED_REFERENCES:
                    demands.add(self._demands(each, depth + 1))
                else:
                    demands.free_types = set()
        demands.add(self._own_demands(schema, depth))
        return demands

    def _own_demands(self, schema: Schema, depth: int) -> _Demands:
        demands = _Demands()
        types = schema.get("type", list(TYPES))
        types = [types] if isinstance(types, str) else types
        if isinstance(types, list):
            demands.types = {"number" if each == "integer" else each for each in types}
        values = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
        )
        if values is not None:
            demands.values = {comparable(value) for value in values if _fits_type(value, types)}
            demands.types &= {_type_of(value) for value in values}
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list) and depth < MAX_NESTED_REFERENCES:
                alternatives = [self._demands(each, depth + 1) for each in schema[keyword]]
                demands.types &= set().union(*(each.types for each in alternatives))
                if alternatives and all(each.values is not None for each in alternatives):
                    values_of = set().union(*(each.values or set() for each in alternatives))
                    demands.values = values_of if demands.values is None else demands.values & values_of
        demands.required = _required_names(schema)
        demands.properties = {
            name: self._demands(each, depth + MAX_NESTED_REFERENCES // 2)
            if depth < MAX_NESTED_REFERENCES
            else _Demands()
            for name, each in _as_dict(schema.get("properties")).items()
        }
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            demands.allowed_names = set(demands.properties)
        demands.free_types = _find_free_types(schema)
        return demands


@dataclass(slots=True)
class _Demands:
    """Conditions that every value of a schema satisfies."""

    types: set[str] = field(default_factory=lambda: set(TYPES))
    values: set[Any] | None = None  # comparable forms of the only possible values; None: any value
    required: set[str] = field(default_factory=set)  # of objects
    properties: dict[str, _Demands] = field(default_factory=dict)
    allowed_names: set[str] | None = None  # of properties; None: any name
    free_types: set[str] = field(default_factory=lambda: set(TYPES))  # values of these that satisfy `values` and
    # `required` match the schema

    def add(self, other: _Demands) -> None:
        """Make this the demands of both schemas together."""
        self.types &= other.types
        if other.values is not None:
            self.values = other.values if self.values is None else self.values & other.values
        self.required |= other.required
        for name, each in other.properties.items():
            if name in self.properties:
                each.add(self.properties[name])
            self.properties[name] = each
        if other.allowed_names is not None:
            self.allowed_names = (
                other.allowed_names if self.allowed_names is None else self.allowed_names & other.allowed_names
            )
        self.free_types &= other.free_types

    def is_disjoint(self, other: _Demands) -> bool:
        if not (self.types & other.types):
            return True
        return self.values is not None and other.values is not None and not (self.values & other.values)

    def is_implied_by(self, other: _Demands, shared: _Demands) -> bool:
        """Return whether all values of the schema with the demands `other` match this one for certain."""
        if not (other.types & shared.types) <= self.types & self.free_types:
            return False
        if self.values is not None and (other.values is None or not other.values <= self.values):
            return False
        has_objects = "object" in other.types & shared.types
        return not has_objects or self.required <= (other.required | shared.required)


class _Restriction:
    """What is added to one member of `oneOf` so that its values match no other member."""

    def __init__(self, demands: _Demands, shared: _Demands) -> None:
        self._demands = _Demands()
        self._demands.add(deepcopy(demands))
        self._demands.add(deepcopy(shared))
        self._shared = shared
        self._all_types = set(self._demands.types)
        self.types = set(self._demands.types)  # that values may have
        self._forbidden: set[str] = set()
        self._required: set[str] = set()

    def exclude(self, other: _Demands) -> bool:
        """Exclude the values of another member. Return whether that was possible without excluding further ones."""
        common = self.types & other.types
        if self._demands.values is not None and other.values is not None:
            common = common if self._demands.values & other.values else set()
        if other.values is None:
            # All values of these types match the other member.
            matching = common & other.free_types - ({"object"} if other.required else set())
            self.types -= matching
            common -= matching
        are_objects_excluded = "object" not in common or self._exclude_objects(other)
        return are_objects_excluded and not common - {"object"}

    def _exclude_objects(self, other: _Demands) -> bool:
        required = self._demands.required | self._required
        differing = [
            name
            for name, each in other.properties.items()
            if name in self._demands.properties and self._demands.properties[name].is_disjoint(each)
        ]
        if any(name in required for name in differing):
            return True
        if other.required & self._forbidden:
            return True
        if other.allowed_names is not None and required - other.allowed_names:
            return True
        for name in sorted(other.required - required):
            self._forbidden.add(name)
            return True
        candidates = list(differing)
        if other.allowed_names is not None:
            candidates += [name for name in self._demands.properties if name not in other.allowed_names]
        for name in candidates:
            if name not in self._forbidden:
                self._required.add(name)
                return True
        return False

    def apply_to(self, member: Any) -> Any:
        extra: Schema = {}
        if self.types != self._all_types:
            extra["type"] = sorted(self.types)
        if self._forbidden:
            extra |= _forbid(sorted(self._forbidden))
        if self._required:
            extra["required"] = sorted(self._required)
        return {"allOf": [member, extra]} if extra else member


def _negate(schema: Any) -> Schema | bool | None:
    """Return a schema that values match if and only if they do not match this one; None if there is no simple one."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    keywords = schema.keys() - ANNOTATIONS
    if not keywords:
        return False
    if len(keywords) == 1:
        return _negate_keyword(next(iter(keywords)), schema)
    # Not all of several conditions: one of them does not hold.
    negated = [_negate_keyword(keyword, schema) for keyword in sorted(keywords)]
    if None in negated or keywords & {"additionalProperties", "patternProperties"}:
        return None
    return {"anyOf": negated}


def _negate_keyword(keyword: str, schema: Schema) -> Schema | bool | None:
    value = schema[keyword]
    match keyword:
        case "type":
            types = [value] if isinstance(value, str) else value
            if not isinstance(types, list) or "integer" in types:
                return None
            return {"type": [each for each in TYPES if each not in types]}
        case "required" if isinstance(value, list) and value:
            return {"type": "object", "anyOf": [_forbid([name]) for name in value]}
        case "anyOf" | "allOf" if isinstance(value, list):
            negated = [_negate(each) for each in value]
            return None if None in negated else {"allOf" if keyword == "anyOf" else "anyOf": negated}
        case "not":
            return value if isinstance(value, dict) else None
        case "properties" if isinstance(value, dict):
            return _negate_properties(value)
        case "enum" | "const":
            return _negate_values(value if keyword == "enum" else [value])
        case "minimum" if "exclusiveMinimum" not in schema:
            return {"type": "number", "exclusiveMaximum": value}
        case "maximum" if "exclusiveMaximum" not in schema:
            return {"type": "number", "exclusiveMinimum": value}
        case "minItems" if isinstance(value, int) and value > 0:
            return {"type": "array", "maxItems": value - 1}
        case "maxItems" if isinstance(value, int):
            return {"type": "array", "minItems": value + 1}
        case "minLength" if isinstance(value, int) and value > 0:
            return {"type": "string", "maxLength": value - 1}
        case "maxLength" if isinstance(value, int):
            return {"type": "string", "minLength": value + 1}
    return None


def _negate_properties(properties: Schema) -> Schema | bool | None:
    """An object does not match `properties` if it has one of them with a value that does not match."""
    negated = {name: _negate(each) for name, each in properties.items()}
    if any(each is None for each in negated.values()):
        return None
    terms = [{"properties": {name: each}, "required": [name]} for name, each in negated.items()]
    return {"type": "object", "anyOf": terms} if terms else False


def _negate_values(values: Any) -> Schema | None:
    """Return a schema of all values except these, if they are booleans and null."""
    if not isinstance(values, list) or not all(value is None or isinstance(value, bool) for value in values):
        return None
    allowed = [value for value in (True, False, None) if value not in values]
    return {"anyOf": [{"type": ["number", "string", "array", "object"]}, *([{"enum": allowed}] if allowed else [])]}


def _array_of(values: Iterable[Any]) -> Schema:
    items = [{"enum": [value]} for value in values]
    # Not prefixItems, which older drafts do not have.
    return {"items": items, "additionalItems": False, "minItems": len(items)} if items else {"maxItems": 0}


def _forbid(names: Iterable[str]) -> Schema:
    return {"properties": dict.fromkeys(names, False)}


def _drop_unknown_format(schema: Schema) -> None:
    if isinstance(schema.get("format"), str):
        schema["format"] = _NARROWER_NAMES.get(schema["format"], schema["format"])
    if isinstance(schema.get("format"), str) and schema["format"] not in ENFORCED_FORMATS:
        del schema["format"]


def _find_free_types(schema: Schema) -> set[str]:
    """Return the types whose values the schema restricts at most by `type`, `enum`, `const` and `required`."""
    restricted: set[str] = set()
    for keyword in schema.keys() - ANNOTATIONS - {"type", "required", "$ref", "allOf", "enum", "const"}:
        restricted |= next((types for types, keywords in _KEYWORDS_OF_TYPES if keyword in keywords), set(TYPES))
    types = schema.get("type")
    if types == "integer" or (isinstance(types, list) and "integer" in types):
        restricted.add("number")
    return set(TYPES) - restricted


def _use_ascii_space(schema: Schema) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _with_ascii_space(pattern)
    if patterns := _as_dict(schema.get("patternProperties")):
        schema["patternProperties"] = {_with_ascii_space(pattern): each for pattern, each in patterns.items()}


def _with_ascii_space(pattern: str) -> str:
    r"""Restrict \s to ASCII, like \d and \w, unless the pattern also has \S, its complement."""
    if r"\S" in pattern:
        return pattern
    return _SPACE_OR_ESCAPE.sub(lambda each: r"[\t\n\v\f\r\x20]" if each[1] else each[0], pattern)


def _narrow_format(schema: Schema) -> None:
    """Exclude texts that the library admits for a format and validators refuse."""
    if schema.get("format") in _NARROWER_FORMATS and "pattern" not in schema:
        schema["pattern"] = _NARROWER_FORMATS[schema["format"]]


def _required_names(schema: Schema) -> set[str]:
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _fits_type(value: Any, types: Any) -> bool:
    types = [types] if isinstance(types, str) else types
    return not isinstance(types, list) or any(has_type(value, each) for each in types)


def _type_of(value: Any) -> str:
    return next(each for each in TYPES if has_type(value, each))


def _as_dict(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}
