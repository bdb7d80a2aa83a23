"""RequestOptions: options of one request, set in `cf-aig-*` headers and `x-emberline-continue`.

An option that is not set is None. Options of a step override those of the request, and these override the gateway's
settings. An invalid value is an error and never replaced by a default.
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
BACKOFFS = ("constant", "linear", "exponential")
MAX_METADATA_ENTRIES = 5
MAX_OPTION_CHARS = 512

Metadata: TypeAlias = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class CustomCost:
    """A cost set by the client in place of the catalogue's: a price, or the cost of the whole request."""

    price: Price | None = None
    micros: int | None = None  # micro-dollars


@dataclass(frozen=True, slots=True)
class RequestOptions:
    gateway_id: str | None = None
    cache_ttl: int | None = None  # seconds; 0: off
    skip_cache: bool | None = None
    cache_key: str | None = None
    collect_log: bool | None = None
    collect_payload: bool | None = None
    metadata: Metadata | None = None
    custom_cost: CustomCost | None = None
    request_timeout: float | None = None  # seconds to the first content of a reply
    timeout_configured: bool | None = None  # `request_timeout` is set by a route or a judge, not by the client
    max_attempts: int | None = None
    retry_delay: float | None = None  # seconds
    backoff: str | None = None
    continuation: bool | None = None  # the next step continues a stream that breaks off
    byok_alias: str | None = None
    event_id: str | None = None
    zdr: bool | None = None
    no_wholesale: bool | None = None  # accepted and ignored: this gateway never resells providers' tokens
    otel_trace_id: str | None = None
    otel_parent_span_id: str | None = None
    session_id: str | None = None
    turn_id: str | None = None
    no_session_affinity: bool | None = None
    allowed_models: tuple[str, ...] | None = None
    allowed_providers: tuple[str, ...] | None = None

    @staticmethod
    def from_headers(headers: Mapping[str, str]) -> RequestOptions:
        """Return the options in the headers of a request or a step; header names are in lower case.

        Raise InvalidRequest if a value is invalid.
        """
        if _HEADERS.keys().isdisjoint(headers):
            return NO_OPTIONS
        values: dict[str, Any] = {}
        for name, (field, read) in _HEADERS.items():
            if (text := headers.get(name)) is not None:
                try:
                    values[field] = read(text.strip())
                except ValueError as e:
                    raise InvalidRequest(f"the header {name} is {text[:80]!r}: {e}", param=name) from e
        return RequestOptions(**values)

    def merged_over(self, defaults: RequestOptions) -> RequestOptions:
        """Return these options, completed with those of `defaults` where they are not set."""
        merged = {
            f.name: getattr(defaults if getattr(self, f.name) is None else self, f.name) for f in fields(RequestOptions)
        }
        return RequestOptions(**merged)


NO_OPTIONS = RequestOptions()


def option_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that set options."""
    return {name: value for name, value in headers.items() if name in _HEADERS}


def _integer(minimum: int, maximum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) <= maximum:
            raise ValueError(f"the value must be an integer from {minimum} to {maximum}")
        return int(text)

    return read


def _milliseconds(minimum: int, maximum: int) -> Callable[[str], float]:
    """Return a reader of milliseconds that returns seconds."""
    read = _integer(minimum, maximum)
    return lambda text: read(text) / 1e3


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("the value must be true or false")
    return text.lower() == "true"


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"the value must be one of {', '.join(choices)}")
        return text

    return read


def _text(text: str) -> str:
    if not text or len(text) > MAX_OPTION_CHARS:
        raise ValueError(f"the value must have 1 to {MAX_OPTION_CHARS} characters")
    return text


def _hex(length: int) -> Callable[[str], str]:
    def read(text: str) -> str:
        if len(text) != length or not set(text) <= set("0123456789abcdefABCDEF"):
            raise ValueError(f"the value must be {length} hexadecimal digits")
        return text.lower()

    return read


def _list(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError("the value must be a list of names with commas between them")
    return names


def _ttl(text: str) -> int:
    seconds = _integer(0, MAX_CACHE_TTL_S)(text)
    if 0 < seconds < 60:
        raise ValueError("the value must be 0 or at least 60 seconds")
    return seconds


def _old_ttl(text: str) -> int:
    """Return seconds: the older header is in milliseconds."""
    return _ttl(str(_integer(0, MAX_CACHE_TTL_S * 1000)(text) // 1000))


def _metadata(text: str) -> Metadata:
    found = _json_object(text)
    if len(found) > MAX_METADATA_ENTRIES:
        raise ValueError(f"the object has {len(found)} entries; at most {MAX_METADATA_ENTRIES} are allowed")
    for name, value in found.items():
        if not isinstance(value, str | int | float | bool):
            raise ValueError(f"the value of {name[:40]!r} must be a string, a number or a boolean")
    return found


def _custom_cost(text: str) -> CustomCost:
    found = _json_object(text)
    match sorted(found):
        case ["per_token_in", "per_token_out"]:
            return CustomCost(price=Price(_dollars(found["per_token_in"], 12), _dollars(found["per_token_out"], 12)))
        case ["total_cost"]:
            return CustomCost(micros=_dollars(found["total_cost"], 6))
    raise ValueError("the object must have per_token_in and per_token_out, or total_cost")


def _dollars(value: object, scale: int) -> int:
    """Return dollars times 10**scale, rounded half up. Decimal, because a float is not exact."""
    try:
        scaled = Decimal(str(value)).scaleb(scale)
        if isinstance(value, bool) or not scaled.is_finite() or not 0 <= scaled < 10**18:
            raise ValueError(f"the cost {str(value)[:40]!r} must be a number of dollars, 0 or more")
    except InvalidOperation:
        raise ValueError(f"the cost {str(value)[:40]!r} must be a number of dollars, 0 or more") from None
    return int(scaled.to_integral_value("ROUND_HALF_UP"))


def _json_object(text: str) -> dict[str, Any]:
    """Decode a header. Servers decode headers as Latin-1, and JSON is UTF-8, so it is decoded again."""
    with suppress(UnicodeError):
        text = text.encode("latin-1").decode()
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except JSON_DECODE_ERRORS as e:
        raise ValueError(f"the value must be a JSON object ({e})") from e
    return found


_HEADERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "cf-aig-gateway-id": ("gateway_id", _text),
    "cf-cache-ttl": ("cache_ttl", _old_ttl),  # this and the next are older names; the newer ones, read later, override
    "cf-skip-cache": ("skip_cache", _boolean),
    "cf-aig-cache-ttl": ("cache_ttl", _ttl),
    "cf-aig-skip-cache": ("skip_cache", _boolean),
    "cf-aig-cache-key": ("cache_key", _text),
    "cf-aig-collect-log": ("collect_log", _boolean),
    "cf-aig-collect-log-payload": ("collect_payload", _boolean),
    "cf-aig-metadata": ("metadata", _metadata),
    "cf-aig-custom-cost": ("custom_cost", _custom_cost),
    "cf-aig-request-timeout": ("request_timeout", _milliseconds(1, 3_600_000)),
    "cf-aig-max-attempts": ("max_attempts", _integer(1, 5)),
    "cf-aig-retry-delay": ("retry_delay", _milliseconds(0, 5000)),
    "cf-aig-backoff": ("backoff", _one_of(*BACKOFFS)),
    "x-emberline-continue": ("continuation", _boolean),
    "cf-aig-byok-alias": ("byok_alias", _text),
    "cf-aig-event-id": ("event_id", _text),
    "cf-aig-zdr": ("zdr", _boolean),
    "cf-aig-no-wholesale": ("no_wholesale", _boolean),
    "cf-aig-otel-trace-id": ("otel_trace_id", _hex(32)),
    "cf-aig-otel-parent-span-id": ("otel_parent_span_id", _hex(16)),
    "cf-aig-session-id": ("session_id", _text),
    "cf-aig-turn-id": ("turn_id", _text),
    "cf-aig-no-session-affinity": ("no_session_affinity", _boolean),
    "cf-aig-allowed-models": ("allowed_models", _list),
    "cf-aig-allowed-providers": ("allowed_providers", _list),
}
