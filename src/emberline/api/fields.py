"""Types of request fields that have no effect on this server, for all protocols.

    store: IgnoredField = None                                  accepts any value; a reply header lists the field
    length_penalty: Annotated[Any, accepts_only(1.0)] = None    accepts only values that ask for the default behaviour
    web_search_options: None = None                             known and not supported: accepts only null (`parse`)

Fields of other types have an effect. Null is accepted for every optional field (`remove_nulls`). Every other field is
rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from emberline.core.errors import InvalidRequest

IGNORED_FIELDS_HEADER = "x-emberline-ignored"  # reply header that lists the request fields without effect

IgnoredField = Annotated[Any, Meta(description="Accepted without effect", extra={"accepts": None})]


def accepts_only(*values: Any) -> Meta:
    """Return the annotation of a field that accepts only these values, which ask for the default behaviour."""
    # The description also keeps the cache of `typing` from merging accepts_only(1) and accepts_only(True).
    description = f"Without effect; may be {values!r}"
    return Meta(description=description, extra={"accepts": values}, extra_json_schema={"enum": [*values, None]})


OnlyFalse = Annotated[Any, accepts_only(False)]
OnlyEmpty = Annotated[Any, accepts_only("", [], {})]


def find_ignored_fields(request: msgspec.Struct, path: str = "") -> list[str]:
    """Return the names of the fields without effect. Raises InvalidRequest for a value that is not accepted."""
    found: list[str] = []
    rules, nested = _rules_of(type(request))
    for attribute, name, accepted in rules:
        value = getattr(request, attribute)
        if value is None:
            continue
        if accepted is None:
            found.append(path + name)
        elif not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted):
            values = " or ".join(msgspec.json.encode(each).decode() for each in accepted)
            hint = f"remove {path}{name}, or send {values}"
            given = msgspec.json.encode(value).decode()[:100]
            raise InvalidRequest(f"{path}{name} is {given}, which is not supported", param=path + name, hint=hint)
    for attribute, name in nested:
        value = getattr(request, attribute)
        if isinstance(value, msgspec.Struct):
            found += find_ignored_fields(value, f"{path}{name}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, msgspec.Struct):
                    found += find_ignored_fields(item, f"{path}{name}[{i}].")
    return found


def remove_nulls(value: Any, declared_type: Any) -> Any:
    """Remove the nulls of optional and unknown fields from decoded JSON, wherever its declared type is a struct."""
    if isinstance(value, list):
        items = [each for each in _union_members(declared_type) if get_origin(each) is list]
        return [remove_nulls(item, get_args(items[0])[0]) for item in value] if items else value
    if not isinstance(value, dict) or (struct := _select_struct(value, declared_type)) is None:
        return value
    fields, hints = {field.encode_name: field for field in msgspec.structs.fields(struct)}, _hints(struct)
    result = {}
    for name, inner in value.items():
        field = fields.get(name)
        if inner is None and (field is None or not field.required):
            continue
        result[name] = inner if field is None else remove_nulls(inner, hints[field.name])
    return result


FieldRules = tuple[list[tuple[str, str, tuple[Any, ...] | None]], list[tuple[str, str]]]


@cache
def _rules_of(struct: type[msgspec.Struct]) -> FieldRules:
    """Return the struct's fields that have a rule, and its fields that hold structs with such fields."""
    rules, nested = [], []
    hints = _hints(struct)
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        accepts = [
            meta.extra["accepts"] for meta in getattr(kind, "__metadata__", ()) if "accepts" in (meta.extra or {})
        ]
        if accepts:
            rules.append((field.name, field.encode_name, accepts[0]))
        elif any(any(_rules_of(inner)) for inner in _structs_in(kind)):
            nested.append((field.name, field.encode_name))
    return rules, nested


@cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def _union_members(kind: Any) -> Iterator[Any]:
    """Yield the members of a union without their annotations."""
    if get_origin(kind) is Annotated:
        yield from _union_members(get_args(kind)[0])
    elif get_origin(kind) in (list, dict) or not get_args(kind):
        yield kind
    else:
        for inner in get_args(kind):
            if inner is not NoneType:
                yield from _union_members(inner)


def _structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    for part in _union_members(kind):
        if get_origin(part) is list:
            yield from _structs_in(get_args(part)[0])
        elif isinstance(part, type) and issubclass(part, msgspec.Struct):
            yield part


def _select_struct(value: dict[str, Any], kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct that the value's tag selects among those that `kind` allows."""
    structs = [part for part in _union_members(kind) if isinstance(part, type) and issubclass(part, msgspec.Struct)]
    if len(structs) == 1:
        return structs[0]
    for struct in structs:
        config = struct.__struct_config__
        if config.tag_field is not None and value.get(config.tag_field) == config.tag:
            return struct
    return None
