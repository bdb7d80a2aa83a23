"""Converts the query parameters of a URL to LogFilters.

The gateway's own API and the Cloudflare API take the same parameters. Parameters that Cloudflare also has are named as
in Cloudflare's API. The parameter `filters` is a JSON array of {key, operator, value}, as in Cloudflare's API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.admin_request import AdminRequest, decode_json
from emberline.gateway.core.identity import ANONYMOUS
from emberline.gateway.store.filters import ContainsFilter, ExcludeFilter, LogFilters, NumberRange

_TEXTS = ("provider", "model", "request_type", "key_id", "user", "event_id", "session_id", "error",
          "request_content_type", "response_content_type")  # fmt: skip
_LISTS = (*_TEXTS, "id")
_SEARCHED = ("provider", "model", "path", "error", "message", "user", "event_id", "session_id")
_FLAGS = ("success", "cached", "rescued")
_RANGES = {  # name in a query -> field of LogFilters
    "cost": "micros",
    "tokens_in": "tokens_in",
    "tokens_out": "tokens_out",
    "tokens": "tokens",
    "duration": "duration_ms",
}
_BOUNDS = {"total_tokens" if name == "tokens" else name: field for name, field in _RANGES.items()}
METADATA_PREFIX = "metadata."
FILTER_PARAMETERS = (
    "since",
    "until",
    "start_date",
    "end_date",
    *_FLAGS,
    "status",
    "feedback",
    *_LISTS,
    *(f"{end}_{name}" for name in _BOUNDS for end in ("min", "max")),
    f"{METADATA_PREFIX}*",
    "search",
    "filters",
)
_FILTER_NAMES = (*_LISTS, *_FLAGS, *_RANGES, "status_code", "feedback", "created_at", "metadata.key", "metadata.value")
_ID = re.compile(r"[0-9a-f]{32}")


class CloudflareFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One element of Cloudflare's `filters`."""

    key: str
    operator: Literal["eq", "neq", "contains", "gt", "lt"]
    value: list[str | int | float | bool] | str | int | float | bool

    @property
    def values(self) -> list[str]:
        found = self.value if isinstance(self.value, list) else [self.value]
        return [each if isinstance(each, str) else msgspec.json.encode(each).decode() for each in found]


class SavedFilters(msgspec.Struct, frozen=True):
    """The filters of a stored dataset. All other fields of the dataset are ignored."""

    filters: list[CloudflareFilter]


def parse_filters(request: AdminRequest, gateway: str, extra_filters: Sequence[CloudflareFilter] = ()) -> LogFilters:
    """Return the log filters in a request's query, combined with `extra_filters`.

    Raise InvalidRequest if a value is invalid or a filter is unknown.
    """
    fields: dict[str, Any] = {}
    for name in _FLAGS:
        if (flag := request.bool_parameter(name)) is not None:
            fields[name] = flag
    for name, field in (("since", "since"), ("start_date", "since"), ("until", "until"), ("end_date", "until")):
        if name in request.query:
            fields[field] = parse_time(request.query[name], name)
    for name in _LISTS:
        if name in request.query:
            fields[name] = tuple(request.query[name].split(","))
    for name in ("status", "feedback"):
        if name in request.query:
            fields[name] = tuple(_read_int(each, name) for each in request.query[name].split(","))
    fields["excluded"], fields["contains"] = (), ()
    if search := request.query.get("search"):
        fields["contains"] = (ContainsFilter(_SEARCHED, (search,)),)
    for name, field in _BOUNDS.items():
        read, bounds = _number_reader(name), (f"min_{name}", f"max_{name}")
        fields[field] = NumberRange(
            *(read(request.query[each], each) if each in request.query else None for each in bounds)
        )
    fields["metadata"] = {
        n.removeprefix(METADATA_PREFIX): v for n, v in request.query.items() if n.startswith(METADATA_PREFIX)
    }
    if "filters" in request.query:
        _add_filters(fields, decode_json(request.query["filters"].encode(), list[CloudflareFilter]))
    _add_filters(fields, list(extra_filters))
    excluded = [id for each in fields["excluded"] if each.field == "id" for id in each.values]
    for id in (*fields.get("id", ()), *excluded):
        if not _ID.fullmatch(id):
            raise InvalidRequest(
                f"id must be the id of a log record, not {str(id)[:80]!r}",
                param="id",
                hint="an id has 32 hexadecimal digits",
            )
    return LogFilters(request.account, gateway, **fields)


def check_filters(filters: Sequence[CloudflareFilter]) -> None:
    """Raise InvalidRequest if one of the filters is invalid."""
    parse_filters(AdminRequest(ANONYMOUS, {"account": ""}, {}, b""), "", filters)


def _add_filters(fields: dict[str, Any], filters: list[CloudflareFilter]) -> None:
    pairs: dict[str, str] = {}
    for each in filters:
        name, values = each.key, each.values
        if not values:
            raise InvalidRequest(
                f"filter {name[:40]!r} must have a value", param="filters", hint="set value to a list of values"
            )
        if each.operator == "neq":
            _add_exclusion_filter(fields, name, values)
        elif each.operator == "contains" and name in _TEXTS:
            fields["contains"] += (ContainsFilter((name,), tuple(values)),)
        elif name in _RANGES and each.operator != "contains":
            fields[_RANGES[name]] = _narrow_range(fields[_RANGES[name]], each)
        elif name == "created_at" and each.operator != "contains":
            ms = parse_time(values[0], name)
            if each.operator != "lt":
                fields["since"] = max(ms + (each.operator == "gt"), fields.get("since", 0))
            if each.operator != "gt":
                last = ms + (each.operator == "eq")
                fields["until"] = min(last, fields.get("until", last))
        elif each.operator != "eq":
            raise InvalidRequest(
                f"filter {name[:40]!r} does not support the operator {each.operator}", param="filters", hint="use eq"
            )
        elif fields.get("status" if name == "status_code" else name) not in (None, ()):
            raise InvalidRequest(
                f"filter {name!r} is given twice", param="filters", hint="put all values into one filter"
            )
        elif name in _LISTS:
            fields[name] = tuple(values)
        elif name in _FLAGS:
            fields[name] = _read_bool(name, values)
        elif name in ("status_code", "feedback"):
            fields["status" if name == "status_code" else name] = tuple(_read_int(v, name) for v in values)
        elif name in ("metadata.key", "metadata.value"):
            pairs[name] = values[0]
        else:
            raise InvalidRequest(
                f"unknown filter {name[:40]!r}", param="filters", hint=f"known filters: {', '.join(_FILTER_NAMES)}"
            )
    if pairs:
        if len(pairs) < 2:
            raise InvalidRequest(
                f"filters metadata.key and metadata.value must be used together, not {next(iter(pairs))} alone",
                param="filters",
                hint="add the missing filter",
            )
        fields["metadata"] = {**fields["metadata"], pairs["metadata.key"]: pairs["metadata.value"]}


def _add_exclusion_filter(fields: dict[str, Any], name: str, values: list[str]) -> None:
    """Add a filter with the operator neq (not equal)."""
    if name in _FLAGS:
        fields[name] = not _read_bool(name, values)
    elif name in _LISTS:
        fields["excluded"] += (ExcludeFilter(name, tuple(values)),)
    elif name in _RANGES:
        fields["excluded"] += (ExcludeFilter(_RANGES[name], tuple(_number_reader(name)(v, "filters") for v in values)),)
    elif name in ("status_code", "feedback"):
        field = "status" if name == "status_code" else name
        fields["excluded"] += (ExcludeFilter(field, tuple(_read_int(v, name) for v in values)),)
    else:
        raise InvalidRequest(f"filter {name[:40]!r} does not support the operator neq", param="filters", hint="use eq")


def _read_bool(name: str, values: list[str]) -> bool:
    if values not in (["true"], ["false"]):
        raise InvalidRequest(f"filter {name!r} must be true or false, not {values[0][:40]!r}", param="filters")
    return values == ["true"]


def _narrow_range(range: NumberRange, filter: CloudflareFilter) -> NumberRange:
    value = _number_reader(filter.key)(filter.values[0], "filters")
    match filter.operator:
        case "eq":
            return NumberRange(value, value)
        case "gt":
            return NumberRange(value + 1, range.maximum)
        case "lt":
            return NumberRange(range.minimum, value - 1)
        case _:
            raise AssertionError(f"filter {filter.key!r} has an unchecked operator {filter.operator!r}")


def join_filter_parameters(parameters: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Replace the parameters `filters.key`, `.operator` and `.value` by one JSON parameter `filters`.

    `filters.value` may be repeated within a filter. A repeated `filters.key` or `filters.operator` starts the next
    filter.
    """
    found: list[dict[str, Any]] = []
    others = []
    for name, value in parameters:
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


def parse_time(text: str, param: str) -> int:
    """Return the time in milliseconds since 1970.

    `text` is either milliseconds since 1970 or an ISO 8601 date and time.
    """
    if text.isdecimal() and len(text) <= 14:
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"{param} must be a time, not {text[:40]!r}",
            param=param,
            hint="give milliseconds since 1970, or a time such as 2026-01-31T12:00:00Z",
        ) from None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1e3)


def _number_reader(name: str) -> Callable[[str, str], int]:
    return _read_micros if name == "cost" else _read_int


def _read_int(text: str, param: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise InvalidRequest(f"{param} must be an integer, not {text[:40]!r}", param=param)
    return int(text)


def _read_micros(text: str, param: str) -> int:
    """Parse an amount in dollars and return micro-dollars."""
    try:
        amount = Decimal(text).scaleb(6)
        if amount.is_finite() and 0 <= amount < 10**15:
            return int(amount)
    except InvalidOperation:
        pass
    raise InvalidRequest(f"{param} must be an amount in dollars, not {text[:40]!r}", param=param)


def find_unknown_parameter(query: Mapping[str, str], known_parameters: tuple[str, ...]) -> str | None:
    """Return the first query parameter that is not in `known_parameters`, or None."""
    prefixes = tuple(name[:-1] for name in known_parameters if name.endswith("*"))
    return next(
        (name for name in query if name not in known_parameters and not (prefixes and name.startswith(prefixes))), None
    )
