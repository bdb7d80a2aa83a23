"""What a request's field may say that has no effect here: the one table of every protocol, written as field types.

    store: Hint = None                                    any value is accepted; the reply's header lists the field
    length_penalty: Annotated[Any, only(1.0)] = None      these values are accepted, as they ask for what happens anyway
    web_search_options: None = None                       known and not served: null alone (`parse`)

A field of any other type is honoured. Null is accepted for every field that may be left out (`without_nulls`). What is
left is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from emberline.core.errors import InvalidRequest

IGNORED = "x-emberline-ignored"  # header of a reply: the fields that had no effect

Hint = Annotated[Any, Meta(description="Accepted without effect", extra={"accepts": None})]


def only(*values: Any) -> Meta:
    """The values that a field may have, as they ask for what happens anyway."""
    # The description also keeps `typing` from taking only(1) for only(True), as it caches types that are equal.
    about = f"Without effect; may be {values!r}"
    return Meta(description=about, extra={"accepts": values}, extra_json_schema={"enum": [*values, None]})


Off = Annotated[Any, only(False)]  # a switch that has its off position alone
Empty = Annotated[Any, only("", [], {})]


def ignored_fields(asked: msgspec.Struct, path: str = "") -> list[str]:
    """The names of the fields without effect. Raises InvalidRequest for a value that its field does not accept."""
    found: list[str] = []
    rules, nested = _table(type(asked))
    for attribute, name, accepted in rules:
        value = getattr(asked, attribute)
        if value is None:
            continue
        if accepted is None:
            found.append(path + name)
        elif not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted):
            shown = " or ".join(msgspec.json.encode(each).decode() for each in accepted)
            hint = f"leave it out, or send {shown}"
            raise InvalidRequest(f"{path}{name} is not served with this value", param=path + name, hint=hint)
    for attribute, name in nested:
        value = getattr(asked, attribute)
        if isinstance(value, msgspec.Struct):
            found += ignored_fields(value, f"{path}{name}.")
        elif isinstance(value, list):
            for at, item in enumerate(value):
                if isinstance(item, msgspec.Struct):
                    found += ignored_fields(item, f"{path}{name}[{at}].")
    return found


def without_nulls(value: Any, kind: Any) -> Any:
    """Decoded JSON without the nulls of optional or unknown fields, where `kind` has a struct; elsewhere as it is."""
    if isinstance(value, list):
        items = [each for each in _parts(kind) if get_origin(each) is list]
        return [without_nulls(item, get_args(items[0])[0]) for item in value] if items else value
    if not isinstance(value, dict) or (struct := _struct_of(value, kind)) is None:
        return value
    fields, hints = {field.encode_name: field for field in msgspec.structs.fields(struct)}, _hints(struct)
    kept = {}
    for name, inner in value.items():
        field = fields.get(name)
        if inner is None and (field is None or not field.required):
            continue
        kept[name] = inner if field is None else without_nulls(inner, hints[field.name])
    return kept


Table = tuple[list[tuple[str, str, tuple[Any, ...] | None]], list[tuple[str, str]]]


@cache
def _table(struct: type[msgspec.Struct]) -> Table:
    """Its fields with a rule, and those that hold structs with such fields."""
    rules, nested = [], []
    hints = _hints(struct)
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        accepts = [
            meta.extra["accepts"] for meta in getattr(kind, "__metadata__", ()) if "accepts" in (meta.extra or {})
        ]
        if accepts:
            rules.append((field.name, field.encode_name, accepts[0]))
        elif any(any(_table(inner)) for inner in _structs(kind)):
            nested.append((field.name, field.encode_name))
    return rules, nested


@cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def _parts(kind: Any) -> Iterator[Any]:
    """The members of a union, without what they are annotated with."""
    if get_origin(kind) is Annotated:
        yield from _parts(get_args(kind)[0])
    elif get_origin(kind) in (list, dict) or not get_args(kind):
        yield kind
    else:
        for inner in get_args(kind):
            if inner is not NoneType:
                yield from _parts(inner)


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    for part in _parts(kind):
        if get_origin(part) is list:
            yield from _structs(get_args(part)[0])
        elif isinstance(part, type) and issubclass(part, msgspec.Struct):
            yield part


def _struct_of(value: dict[str, Any], kind: Any) -> type[msgspec.Struct] | None:
    """Of the structs that this may be, the one that its tag names."""
    structs = [part for part in _parts(kind) if isinstance(part, type) and issubclass(part, msgspec.Struct)]
    if len(structs) == 1:
        return structs[0]
    for struct in structs:
        config = struct.__struct_config__
        if config.tag_field is not None and value.get(config.tag_field) == config.tag:
            return struct
    return None
