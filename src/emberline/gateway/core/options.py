"""RequestOptions: options of one request, set in `cf-aig-*` headers and `x-emberline-continue`.

An option that is not set is None. Options of a step (one provider and model to try) override the request's options,
which override the gateway's settings. An invalid value is rejected, never replaced by a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.cost import Price
from emberline.net.json_errors import JSON_DECODE_ERRORS

MAX_CACHE_TTL_S = 31 * 86_400
GATEWAY_ID_HEADER = "cf-aig-gateway-id"
BACKOFFS = ("constant", "linear", "exponential")
MAX_METADATA_ENTRIES = 5
MAX_OPTION_CHARS = 512
MAX_STATED_COST_DOLLARS = 1_000_000  # of a request, and of a token

Metadata: TypeAlias = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class CustomCost:
    """A cost that the client sets instead of the catalogue price.

    It is a price per token, or the cost of the whole request.
    """

    price: Price | None = None
    micros: int | None = None  # micro-dollars


@dataclass(frozen=True, slots=True)
class RequestOptions:
    gateway_id: str | None = None  # gateway to use, on paths that name none
    cache_ttl: int | None = None  # seconds; 0: off
    skip_cache: bool | None = None  # neither read nor write the cache
    cache_key: str | None = None  # cache key, instead of the body
    collect_log: bool | None = None  # write a log record
    collect_payload: bool | None = None  # store the bodies with the log record
    metadata: Metadata | None = None  # JSON object of at most 5 texts, numbers or booleans, for logs, limits and routes
    custom_cost: CustomCost | None = None  # cost of the request; the key needs the scope cost
    request_timeout: float | None = None  # seconds to the first content of a reply
    timeout_configured: bool | None = None  # `request_timeout` is set by a route or a judge, not by the client
    max_attempts: int | None = None  # at one provider, including the first
    retry_delay: float | None = None  # seconds
    backoff: str | None = None  # constant, linear or exponential
    continuation: bool | None = None  # the next step continues a stream that breaks off
    byok_alias: str | None = None  # alias of the stored provider key to use
    event_id: str | None = None  # id of your own, which the log record has too
    zdr: bool | None = None  # zero data retention: bodies are not stored
    no_wholesale: bool | None = None  # accepted and ignored: this gateway never resells providers' tokens
    otel_trace_id: str | None = None  # trace of the parent span, 32 hexadecimal digits
    otel_parent_span_id: str | None = None  # parent span, 16 hexadecimal digits
    session_id: str | None = None  # conversation, for log searches and for staying with one provider of a pool
    turn_id: str | None = None  # turn of a conversation, for log searches
    no_session_affinity: bool | None = None  # the session need not stay with one provider
    allowed_models: tuple[str, ...] | None = None  # patterns of models that this request may use
    allowed_providers: tuple[str, ...] | None = None  # patterns of providers that this request may use

    @staticmethod
    def from_headers(headers: Mapping[str, str]) -> RequestOptions:
        """Read the options from the headers of a request or of a step.

        Header names must be in lower case. Raise InvalidRequest if a value is invalid.
        """
        if _HEADERS.keys().isdisjoint(headers):
            return NO_OPTIONS
        values: dict[str, Any] = {}
        for name, (field, read) in _HEADERS.items():
            if (text := headers.get(name)) is not None:
                try:
                    values[field] = read(text.strip())
                except ValueError as e:
                    raise InvalidRequest(f"header {name} has the invalid value {text[:80]!r}: {e}", param=name) from e
        return RequestOptions(**values)

    def with_defaults(self, defaults: RequestOptions) -> RequestOptions:
        """Return a copy of these options. An option that is not set here takes its value from `defaults`."""
        merged = {
            f.name: getattr(defaults if getattr(self, f.name) is None else self, f.name) for f in fields(RequestOptions)
        }
        return RequestOptions(**merged)


NO_OPTIONS = RequestOptions()


def select_option_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that set options."""
    return {name: value for name, value in headers.items() if name in _HEADERS}


def _integer_reader(minimum: int, maximum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) <= maximum:
            raise ValueError(f"the value must be an integer from {minimum} to {maximum}")
        return int(text)

    return read


def _milliseconds_reader(minimum: int, maximum: int) -> Callable[[str], float]:
    """Return a function that parses a number of milliseconds and returns seconds."""
    read = _integer_reader(minimum, maximum)
    return lambda text: read(text) / 1e3


def _read_boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("the value must be true or false")
    return text.lower() == "true"


def _choice_reader(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"the value must be one of {', '.join(choices)}")
        return text

    return read


def _read_text(text: str) -> str:
    if not text or len(text) > MAX_OPTION_CHARS:
        raise ValueError(f"the value must have 1 to {MAX_OPTION_CHARS} characters")
    return text


def _hex_reader(length: int) -> Callable[[str], str]:
    def read(text: str) -> str:
        if len(text) != length or not set(text) <= set("0123456789abcdefABCDEF"):
            raise ValueError(f"the value must be {length} hexadecimal digits")
        return text.lower()

    return read


def _read_list(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError("the value must be a list of names with commas between them")
    return names


def _read_ttl_s(text: str) -> int:
    seconds = _integer_reader(0, MAX_CACHE_TTL_S)(text)
    if 0 < seconds < 60:
        raise ValueError("the value must be 0 or at least 60 seconds")
    return seconds


def _read_ttl_ms(text: str) -> int:
    """Parse a time to live in milliseconds, the unit of an older header, and return seconds."""
    return _read_ttl_s(str(_integer_reader(0, MAX_CACHE_TTL_S * 1000)(text) // 1000))


def _read_metadata(text: str) -> Metadata:
    found = _read_json_object(text)
    if len(found) > MAX_METADATA_ENTRIES:
        raise ValueError(f"the object must have at most {MAX_METADATA_ENTRIES} entries, not {len(found)}")
    for name, value in found.items():
        if not isinstance(value, str | int | float | bool):
            raise ValueError(f"the value of {name[:40]!r} must be a string, a number or a boolean")
    return found


def _read_custom_cost(text: str) -> CustomCost:
    found = _read_json_object(text)
    match sorted(found):
        case ["per_token_in", "per_token_out"]:
            return CustomCost(
                price=Price(
                    _read_scaled_dollars(found["per_token_in"], 12), _read_scaled_dollars(found["per_token_out"], 12)
                )
            )
        case ["total_cost"]:
            return CustomCost(micros=_read_scaled_dollars(found["total_cost"], 6))
    raise ValueError("the object must have per_token_in and per_token_out, or total_cost")


def _read_scaled_dollars(value: object, decimal_places: int) -> int:
    """Return dollars times 10**decimal_places, rounded half up.

    Decimal arithmetic is used because floats are inexact.
    """
    try:
        dollars = Decimal(str(value))
        is_valid = not isinstance(value, bool) and dollars.is_finite() and 0 <= dollars <= MAX_STATED_COST_DOLLARS
    except InvalidOperation:
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"a cost must be a number of dollars from 0 to {MAX_STATED_COST_DOLLARS}, not {str(value)[:40]!r}"
        )
    return int(dollars.scaleb(decimal_places).to_integral_value("ROUND_HALF_UP"))


def _read_json_object(text: str) -> dict[str, Any]:
    """Decode a JSON object in a header.

    Servers decode header bytes as Latin-1, so the text is first converted back to bytes and decoded as UTF-8.
    """
    with suppress(UnicodeError):
        text = text.encode("latin-1").decode()
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except JSON_DECODE_ERRORS as e:
        raise ValueError(f"the value must be a JSON object: {e}") from e
    return found


_HEADERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    GATEWAY_ID_HEADER: ("gateway_id", _read_text),
    "cf-cache-ttl": (
        "cache_ttl",
        _read_ttl_ms,
    ),  # this and the next are older names; the newer ones, read later, override
    "cf-skip-cache": ("skip_cache", _read_boolean),
    "cf-aig-cache-ttl": ("cache_ttl", _read_ttl_s),
    "cf-aig-skip-cache": ("skip_cache", _read_boolean),
    "cf-aig-cache-key": ("cache_key", _read_text),
    "cf-aig-collect-log": ("collect_log", _read_boolean),
    "cf-aig-collect-log-payload": ("collect_payload", _read_boolean),
    "cf-aig-metadata": ("metadata", _read_metadata),
    "cf-aig-custom-cost": ("custom_cost", _read_custom_cost),
    "cf-aig-request-timeout": ("request_timeout", _milliseconds_reader(1, 3_600_000)),
    "cf-aig-max-attempts": ("max_attempts", _integer_reader(1, 5)),
    "cf-aig-retry-delay": ("retry_delay", _milliseconds_reader(0, 5000)),
    "cf-aig-backoff": ("backoff", _choice_reader(*BACKOFFS)),
    "x-emberline-continue": ("continuation", _read_boolean),
    "cf-aig-byok-alias": ("byok_alias", _read_text),
    "cf-aig-event-id": ("event_id", _read_text),
    "cf-aig-zdr": ("zdr", _read_boolean),
    "cf-aig-no-wholesale": ("no_wholesale", _read_boolean),
    "cf-aig-otel-trace-id": ("otel_trace_id", _hex_reader(32)),
    "cf-aig-otel-parent-span-id": ("otel_parent_span_id", _hex_reader(16)),
    "cf-aig-session-id": ("session_id", _read_text),
    "cf-aig-turn-id": ("turn_id", _read_text),
    "cf-aig-no-session-affinity": ("no_session_affinity", _read_boolean),
    "cf-aig-allowed-models": ("allowed_models", _read_list),
    "cf-aig-allowed-providers": ("allowed_providers", _read_list),
}
