"""Types for request fields that the server knows but does not act on.

    store: IgnoredField = None                                  accepts any value; a reply header lists the field
    length_penalty: Annotated[Any, accepts_only(1.0)] = None    accepts only values that ask for the default behaviour
    web_search_options: None = None                             not supported: accepts only null

Fields of all other types have an effect. Null is accepted for every optional field. A field that the request's struct
does not declare is rejected unless it is null; the error names the field.
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
    """Return the annotation of a field that accepts only `values`: those that mean the default behaviour."""
    # The description also keeps the cache of `typing` from merging accepts_only(1) and accepts_only(True).
    description = f"Without effect; may be {values!r}"
    return Meta(description=description, extra={"accepts": values}, extra_json_schema={"enum": [*values, None]})


OnlyFalse = Annotated[Any, accepts_only(False)]
OnlyEmpty = Annotated[Any, accepts_only("", [], {})]


def find_ignored_fields(request: msgspec.Struct, path: str = "") -> list[str]:
    """Return the names of the fields that the request sets and the server ignores.

    Raises InvalidRequest if a field that accepts only some values (`accepts_only`) has a different value.
    """
    found: list[str] = []
    rules, nested = _find_field_rules(type(request))
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
    """Return decoded JSON without its null fields. Fields that `declared_type` requires are kept."""
    if isinstance(value, list):
        items = [each for each in _iter_union_members(declared_type) if get_origin(each) is list]
        return [remove_nulls(item, get_args(items[0])[0]) for item in value] if items else value
    if not isinstance(value, dict) or (struct := _select_struct(value, declared_type)) is None:
        return value
    fields, hints = {field.encode_name: field for field in msgspec.structs.fields(struct)}, _resolve_type_hints(struct)
    result = {}
    for name, inner in value.items():
        field = fields.get(name)
        if inner is None and (field is None or not field.required):
            continue
        result[name] = inner if field is None else remove_nulls(inner, hints[field.name])
    return result


FieldRules = tuple[list[tuple[str, str, tuple[Any, ...] | None]], list[tuple[str, str]]]


@cache
def _find_field_rules(struct: type[msgspec.Struct]) -> FieldRules:
    """Return (restricted fields, nested fields) of the struct.

    Restricted fields are ignored or accept only some values. Nested fields hold structs with restricted fields.
    """
    rules, nested = [], []
    hints = _resolve_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        accepts = [
            meta.extra["accepts"] for meta in getattr(kind, "__metadata__", ()) if "accepts" in (meta.extra or {})
        ]
        if accepts:
            rules.append((field.name, field.encode_name, accepts[0]))
        elif any(any(_find_field_rules(inner)) for inner in _find_structs(kind)):
            nested.append((field.name, field.encode_name))
    return rules, nested


@cache
def _resolve_type_hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def _iter_union_members(declared_type: Any) -> Iterator[Any]:
    """Yield the members of a union without their annotations."""
    if get_origin(declared_type) is Annotated:
        yield from _iter_union_members(get_args(declared_type)[0])
    elif get_origin(declared_type) in (list, dict) or not get_args(declared_type):
        yield declared_type
    else:
        for inner in get_args(declared_type):
            if inner is not NoneType:
                yield from _iter_union_members(inner)


def _find_structs(declared_type: Any) -> Iterator[type[msgspec.Struct]]:
    for part in _iter_union_members(declared_type):
        if get_origin(part) is list:
            yield from _find_structs(get_args(part)[0])
        elif isinstance(part, type) and issubclass(part, msgspec.Struct):
            yield part


def _select_struct(value: dict[str, Any], declared_type: Any) -> type[msgspec.Struct] | None:
    """Return the struct that the JSON value's tag (such as its `type`) selects in `declared_type`."""
    structs = [
        part
        for part in _iter_union_members(declared_type)
        if isinstance(part, type) and issubclass(part, msgspec.Struct)
    ]
    if len(structs) == 1:
        return structs[0]
    for struct in structs:
        config = struct.__struct_config__
        if config.tag_field is not None and value.get(config.tag_field) == config.tag:
            return struct
    return None
