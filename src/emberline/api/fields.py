"""Which fields of a request have an effect, and what happens to the others.

    store: IgnoredField = None                                  accepts any value; a reply header lists the field
    length_penalty: Annotated[Any, accepts_only(1.0)] = None    accepts only values that ask for the default behaviour
    container: Annotated[Any, without_effect({})] = None        accepts any value; the header lists all but these
    web_search_options: None = None                             not supported: accepts only null
    tools: Annotated[list[Tool], keeps_types("function")]       items of other types are left out; the header lists them

Fields of all other types have an effect. Null is accepted for every optional field. A field that no struct declares
is left out of the request (`remove_unknown_fields`), and the header lists it: clients are newer than servers. So only
declared fields are refused, because they would change the answer's meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from emberline.core.errors import InvalidRequest

IGNORED_FIELDS_HEADER = "x-emberline-ignored"  # reply header that lists the request fields without effect
MAX_LISTED_FIELDS = 32
MAX_FIELD_NAME_CHARS = 80

_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.:\[\]/-]")

IgnoredField = Annotated[Any, Meta(description="Accepted without effect", extra={"accepts": (), "refuses": False})]


# Fields that clients send with a message and that add nothing: copies of its text or arguments, cache marks, and ids of
# a reply. No template reads them, so they are not listed as ignored either.
RedundantField = Any


def accepts_only(*values: Any) -> Meta:
    """Return the annotation of a field that accepts only `values`: those that mean the default behaviour."""
    # The description also keeps the cache of `typing` from merging accepts_only(1) and accepts_only(True).
    description = f"Without effect; may be {values!r}"
    return Meta(
        description=description,
        extra={"accepts": values, "refuses": True},
        extra_json_schema={"enum": [*values, None]},
    )


def without_effect(*defaults: Any) -> Meta:
    """Return the annotation of a field that has no effect. It is listed as ignored unless it is one of `defaults`."""
    # The description keeps the cache of `typing` from merging the annotations of different defaults.
    description = f"Accepted without effect; not listed as ignored: {defaults!r}"
    return Meta(description=description, extra={"accepts": defaults, "refuses": False})


def keeps_types(*types: str) -> Meta:
    """Return the annotation of a list whose objects of other types (strings: other values) are left out."""
    return Meta(description=f"Types that have an effect: {', '.join(types)}", extra={"keeps": frozenset(types)})


def drops_types(*types: str) -> Meta:
    """Return the annotation of a list whose objects of these types are left out."""
    return Meta(description=f"Types without effect: {', '.join(types)}", extra={"drops": frozenset(types)})


OnlyFalse = Annotated[Any, accepts_only(False)]
OnlyEmpty = Annotated[Any, accepts_only("", [], {})]


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """The names of request fields that have no effect on the reply."""

    known: tuple[str, ...] = ()  # fields that the server declares: a bounded set of names
    unknown: tuple[str, ...] = ()  # other fields, and tools that the server cannot run

    def with_known(self, names: Iterable[str]) -> IgnoredFields:
        return IgnoredFields((*self.known, *names), self.unknown)

    def to_header_value(self) -> str:
        """Return the names for the reply header, in printable ASCII and of limited length; "" if there are none."""
        names = [*dict.fromkeys(_to_safe_name(name) for name in (*self.known, *self.unknown))]
        rest = [f"and {len(names) - MAX_LISTED_FIELDS} more"] if len(names) > MAX_LISTED_FIELDS else []
        return ", ".join(names[:MAX_LISTED_FIELDS] + rest)


NONE_IGNORED = IgnoredFields()


def _to_safe_name(name: str) -> str:
    return _UNSAFE_CHARACTERS.sub("?", name[:MAX_FIELD_NAME_CHARS])


def find_ignored_fields(request: msgspec.Struct, path: str = "") -> list[str]:
    """Return the names of the fields that the request sets and the server ignores.

    Raises InvalidRequest if a field that accepts only some values (`accepts_only`) has a different value.
    """
    found: list[str] = []
    rules, nested = _find_field_rules(type(request))
    for attribute, name, accepted, refuses in rules:
        value = getattr(request, attribute)
        if value is None:
            continue
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted):
            continue
        if not refuses:
            found.append(path + name)
        else:
            values = " or ".join(msgspec.json.encode(each).decode() for each in accepted)
            hint = f"remove {path}{name}, or send {values}"
            given = msgspec.json.encode(value).decode()[:100]
            raise InvalidRequest(f"{path}{name} is {given}, which is not supported", param=path + name, hint=hint)
    for attribute, name in nested:
        value = getattr(request, attribute)
        if isinstance(value, msgspec.Struct):
            found += find_ignored_fields(value, f"{path}{name}.")
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, msgspec.Struct):
                    found += find_ignored_fields(item, f"{path}{name}[].")
    return [*dict.fromkeys(found)]


def remove_unknown_fields(value: Any, declared_type: Any, path: str = "") -> tuple[Any, list[str]]:
    """Return decoded JSON without what `declared_type` does not declare, and the names of what was removed.

    Null fields are removed unless they are required; they are not among the names.
    """
    removed: dict[str, None] = {}
    return _remove_from_value(value, declared_type, path, removed), [*removed]


def _remove_from_value(value: Any, declared_type: Any, path: str, removed: dict[str, None]) -> Any:
    if isinstance(value, list):
        return _remove_from_list(value, declared_type, path, removed)
    if not isinstance(value, dict) or (struct := _select_struct(value, declared_type)) is None:
        return value
    fields, hints = _resolve_fields(struct), _resolve_type_hints(struct)
    tag_field = struct.__struct_config__.tag_field
    dot, result = "." if path else "", {}
    for name, inner in value.items():
        field = fields.get(name)
        if name == tag_field:
            result[name] = inner
        elif field is None:
            if inner is not None:
                removed[f"{path}{dot}{name[:MAX_FIELD_NAME_CHARS]}"] = None
        elif inner is not None or field.required:
            result[name] = _remove_from_value(inner, hints[field.name], f"{path}{dot}{name}", removed)
    return result


def _remove_from_list(items: list[Any], declared_type: Any, path: str, removed: dict[str, None]) -> list[Any]:
    if (list_type := _find_list_type(declared_type)) is None:
        return items
    result = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else item
        if isinstance(kind, str) and list_type.leaves_out(kind):
            removed[f"{path}[{kind[:MAX_FIELD_NAME_CHARS]}]"] = None
        else:
            result.append(_remove_from_value(item, list_type.item_type, f"{path}[]", removed))
    return result


def _names_types(meta: Any) -> bool:
    return isinstance(meta, Meta) and bool((meta.extra or {}).keys() & {"keeps", "drops"})


@dataclass(frozen=True, slots=True)
class _ListType:
    item_type: Any
    keeps: frozenset[str] | None = None
    drops: frozenset[str] = frozenset()

    def leaves_out(self, kind: str) -> bool:
        return kind in self.drops or (self.keeps is not None and kind not in self.keeps)


@cache
def _find_list_type(declared_type: Any, rule: Meta | None = None) -> _ListType | None:
    """Return the list type among the members of the union, or None."""
    if get_origin(declared_type) is Annotated:
        inner, *metadata = get_args(declared_type)
        return _find_list_type(inner, next((meta for meta in metadata if _names_types(meta)), None))
    if get_origin(declared_type) is list:
        return _ListType(get_args(declared_type)[0], **((rule.extra or {}) if rule is not None else {}))
    members = () if get_origin(declared_type) is dict else get_args(declared_type)
    return next(filter(None, map(_find_list_type, members)), None)


FieldRules = tuple[list[tuple[str, str, tuple[Any, ...], bool]], list[tuple[str, str]]]


@cache
def _find_field_rules(struct: type[msgspec.Struct]) -> FieldRules:
    """Return (restricted fields, nested fields) of the struct.

    Restricted fields are (attribute, name, values without effect, whether other values are refused). Nested fields hold
    structs with restricted fields.
    """
    rules, nested = [], []
    hints = _resolve_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        found = [meta.extra for meta in getattr(kind, "__metadata__", ()) if "accepts" in (meta.extra or {})]
        if found:
            rules.append((field.name, field.encode_name, found[0]["accepts"], found[0]["refuses"]))
        elif any(any(_find_field_rules(inner)) for inner in _find_structs(kind)):
            nested.append((field.name, field.encode_name))
    return rules, nested


@cache
def _resolve_fields(struct: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


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


@cache
def _list_structs(declared_type: Any) -> tuple[type[msgspec.Struct], ...]:
    members = _iter_union_members(declared_type)
    return tuple(part for part in members if isinstance(part, type) and issubclass(part, msgspec.Struct))


def _select_struct(value: dict[str, Any], declared_type: Any) -> type[msgspec.Struct] | None:
    """Return the struct that the JSON value's tag (such as its `type`) selects in `declared_type`."""
    structs = _list_structs(declared_type)
    if len(structs) == 1:
        return structs[0]
    for struct in structs:
        config = struct.__struct_config__
        if config.tag_field is not None and value.get(config.tag_field) == config.tag:
            return struct
    return None
