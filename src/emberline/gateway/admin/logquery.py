"""Log queries: parameters of a URL to Filters. The same on both faces of the API, with Cloudflare's names where it has
some, and its `filters` as a JSON array of {key, operator, value}."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.ask import Ask, decoded
from emberline.gateway.keys.identity import ANONYMOUS
from emberline.gateway.store.filters import Containing, Filters, Span, Unlike

_TEXTS = ("provider", "model", "request_type", "key_id", "user", "event_id", "session_id", "error",
          "request_content_type", "response_content_type")  # fmt: skip
_LISTS = (*_TEXTS, "id")
_SEARCHED = ("provider", "model", "path", "error", "user", "event_id", "session_id")
_FLAGS = ("success", "cached", "rescued")
_SPANS = {
    "cost": "micros",
    "tokens_in": "tokens_in",
    "tokens_out": "tokens_out",
    "tokens": "tokens",
    "duration": "duration_ms",
}
_BOUNDS = {"total_tokens" if name == "tokens" else name: field for name, field in _SPANS.items()}
METADATA = "metadata."
QUERY = (
    "since",
    "until",
    "start_date",
    "end_date",
    *_FLAGS,
    "status",
    "feedback",
    *_LISTS,
    *(f"{end}_{name}" for name in _BOUNDS for end in ("min", "max")),
    f"{METADATA}*",
    "search",
    "filters",
)
_ID = re.compile(r"[0-9a-f]{32}")


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of Cloudflare's filters."""

    key: str
    operator: Literal["eq", "neq", "contains", "gt", "lt"]
    value: list[str | int | float | bool] | str | int | float | bool

    @property
    def values(self) -> list[str]:
        found = self.value if isinstance(self.value, list) else [self.value]
        return [each if isinstance(each, str) else msgspec.json.encode(each).decode() for each in found]


class SavedFilters(msgspec.Struct, frozen=True):
    """What a dataset has of them, among other things."""

    filters: list[Asked]


def filters(request: Ask, gateway: str, more: Sequence[Asked] = ()) -> Filters:
    """`more`: filters besides those of the query."""
    given: dict[str, Any] = {}
    for name in _FLAGS:
        if (flag := request.flag(name)) is not None:
            given[name] = flag
    for name, field in (("since", "since"), ("start_date", "since"), ("until", "until"), ("end_date", "until")):
        if name in request.query:
            given[field] = moment(request.query[name], name)
    for name in _LISTS:
        if name in request.query:
            given[name] = tuple(request.query[name].split(","))
    for name in ("status", "feedback"):
        if name in request.query:
            given[name] = tuple(_whole(each, name) for each in request.query[name].split(","))
    given["unlike"], given["containing"] = (), ()
    if search := request.query.get("search"):
        given["containing"] = (Containing(_SEARCHED, (search,)),)
    for name, field in _BOUNDS.items():
        read = _reader(name)
        ends = [
            read(request.query[each], each) if each in request.query else None
            for each in (f"min_{name}", f"max_{name}")
        ]
        given[field] = Span(*ends)
    given["metadata"] = {n.removeprefix(METADATA): v for n, v in request.query.items() if n.startswith(METADATA)}
    if "filters" in request.query:
        _add(given, decoded(request.query["filters"].encode(), list[Asked]))
    _add(given, list(more))
    unlike = [id for each in given["unlike"] if each.field == "id" for id in each.values]
    for id in (*given.get("id", ()), *unlike):
        if not _ID.fullmatch(id):
            raise InvalidRequest("the id of a log is 32 hexadecimal digits", param="id")
    return Filters(request.account, gateway, **given)


def check(asked: Sequence[Asked]) -> None:
    """Raises InvalidRequest for filters that cannot be used."""
    filters(Ask(ANONYMOUS, {"account": ""}, {}, b""), "", asked)


def _add(given: dict[str, Any], asked: list[Asked]) -> None:
    pairs: dict[str, str] = {}
    for each in asked:
        name, values = each.key, each.values
        if not values:
            raise InvalidRequest(f"the filter {name[:40]!r} has no value", param="filters")
        if each.operator == "neq":
            _add_unlike(given, name, values)
        elif each.operator == "contains" and name in _TEXTS:
            given["containing"] += (Containing((name,), tuple(values)),)
        elif name in _SPANS and each.operator != "contains":
            given[_SPANS[name]] = _narrowed(given[_SPANS[name]], each)
        elif name == "created_at" and each.operator != "contains":
            ms = moment(values[0], name)
            if each.operator != "lt":
                given["since"] = max(ms + (each.operator == "gt"), given.get("since", 0))
            if each.operator != "gt":
                last = ms + (each.operator == "eq")
                given["until"] = min(last, given.get("until", last))
        elif each.operator != "eq":
            raise InvalidRequest(f"the filter {name[:40]!r} does not take {each.operator}", param="filters")
        elif given.get("status" if name == "status_code" else name) not in (None, ()):
            raise InvalidRequest(f"{name!r} is filtered twice", param="filters", hint="put its values into one filter")
        elif name in _LISTS:
            given[name] = tuple(values)
        elif name in _FLAGS:
            given[name] = _truth(name, values)
        elif name in ("status_code", "feedback"):
            given["status" if name == "status_code" else name] = tuple(_whole(v, name) for v in values)
        elif name in ("metadata.key", "metadata.value"):
            pairs[name] = values[0]
        else:
            raise InvalidRequest(f"there is no filter {name[:40]!r}", param="filters")
    if pairs:
        if len(pairs) < 2:
            raise InvalidRequest("metadata.key and metadata.value need each other", param="filters")
        given["metadata"] = {**given["metadata"], pairs["metadata.key"]: pairs["metadata.value"]}


def _add_unlike(given: dict[str, Any], name: str, values: list[str]) -> None:
    if name in _FLAGS:
        given[name] = not _truth(name, values)
    elif name in _LISTS:
        given["unlike"] += (Unlike(name, tuple(values)),)
    elif name in _SPANS:
        given["unlike"] += (Unlike(_SPANS[name], tuple(_reader(name)(v, "filters") for v in values)),)
    elif name in ("status_code", "feedback"):
        field = "status" if name == "status_code" else name
        given["unlike"] += (Unlike(field, tuple(_whole(v, name) for v in values)),)
    else:
        raise InvalidRequest(f"the filter {name[:40]!r} does not take neq", param="filters")


def _truth(name: str, values: list[str]) -> bool:
    if values not in (["true"], ["false"]):
        raise InvalidRequest(f"the filter {name!r} takes true or false", param="filters")
    return values == ["true"]


def _narrowed(span: Span, asked: Asked) -> Span:
    value = _reader(asked.key)(asked.values[0], "filters")
    match asked.operator:
        case "eq":
            return Span(value, value)
        case "gt":
            return Span(value + 1, span.most)
        case "lt":
            return Span(span.least, value - 1)
        case _:
            raise AssertionError("not reached")


def gathered(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The parameters of a URL with `filters.key=..&filters.operator=..&filters.value=..`, as Cloudflare's clients write
    a list of filters, made into one `filters` of JSON. A `value` may come several times; each other part that comes
    again begins the next filter."""
    found: list[dict[str, Any]] = []
    others = []
    for name, value in pairs:
        part = name.removeprefix("filters.") if name.startswith("filters.") else ""
        if part not in ("key", "operator", "value"):
            others.append((name, value))
        elif part == "value" and found:
            found[-1].setdefault("value", []).append(value)
        elif not found or part in found[-1] or len(found[-1]) == 3:
            found.append({part: [value] if part == "value" else value})
        else:
            found[-1][part] = value
    return [*others, ("filters", msgspec.json.encode(found).decode())] if found else others


def moment(text: str, param: str) -> int:
    """Milliseconds since 1970, or a date and time."""
    if text.isdecimal() and len(text) <= 14:
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"{param} must be milliseconds since 1970 or like 2026-01-31T12:00:00Z", param=param
        ) from None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1e3)


def _reader(name: str) -> Callable[[str, str], int]:
    return _micros if name == "cost" else _whole


def _whole(text: str, param: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise InvalidRequest(f"{param} must be a whole number", param=param)
    return int(text)


def _micros(text: str, param: str) -> int:
    try:
        amount = Decimal(text).scaleb(6)
        if amount.is_finite() and 0 <= amount < 10**15:
            return int(amount)
    except InvalidOperation:
        pass
    raise InvalidRequest(f"{param} must be dollars", param=param)


def unknown(query: Mapping[str, str], known: tuple[str, ...]) -> str | None:
    """The first parameter that an endpoint does not have."""
    starts = tuple(name[:-1] for name in known if name.endswith("*"))
    return next((name for name in query if name not in known and not (starts and name.startswith(starts))), None)
