"""Options: what a caller asks of the gateway itself, in `cf-aig-*` headers and one of ours. What was not asked is None;
a step's lie over the request's, and those over the gateway's settings. A bad value is an error, never a default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.costs.cost import Price
from emberline.net.notjson import NOT_JSON

MONTH = 31 * 86_400
BACKOFFS = ("constant", "linear", "exponential")
MOST_METADATA = 5
LONGEST_TEXT = 512

Metadata: TypeAlias = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class CustomCost:
    """In place of the catalogue's: a price, or the cost of the whole request."""

    price: Price | None = None
    micros: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    gateway_id: str | None = None
    cache_ttl: int | None = None  # seconds; 0: off
    skip_cache: bool | None = None
    cache_key: str | None = None
    collect_log: bool | None = None
    collect_payload: bool | None = None
    metadata: Metadata | None = None
    custom_cost: CustomCost | None = None
    request_timeout: float | None = None  # seconds to the first part of a reply
    timeout_configured: bool | None = None  # it is a route's or a judge's, not the caller's
    max_attempts: int | None = None
    retry_delay: float | None = None  # seconds
    backoff: str | None = None
    continuation: bool | None = None  # of a broken stream, by the next step
    byok_alias: str | None = None
    event_id: str | None = None
    zdr: bool | None = None
    no_wholesale: bool | None = None  # always so: nothing is bought here for others
    otel_trace_id: str | None = None
    otel_parent_span_id: str | None = None
    session_id: str | None = None
    turn_id: str | None = None
    no_session_affinity: bool | None = None
    allowed_models: tuple[str, ...] | None = None
    allowed_providers: tuple[str, ...] | None = None

    @staticmethod
    def read(headers: Mapping[str, str]) -> Options:
        """From a request's or a step's headers, whose names are in lower case."""
        if _HEADERS.keys().isdisjoint(headers):
            return NOTHING
        given: dict[str, Any] = {}
        for name, (field, read) in _HEADERS.items():
            if (text := headers.get(name)) is not None:
                try:
                    given[field] = read(text.strip())
                except ValueError as e:
                    raise InvalidRequest(f"{name} is {text[:80]!r}: {e}", param=name) from e
        return Options(**given)

    def over(self, below: Options) -> Options:
        """These, and where they say nothing, `below`."""
        merged = {f.name: getattr(below if getattr(self, f.name) is None else self, f.name) for f in fields(Options)}
        return Options(**merged)


NOTHING = Options()


def asking(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of the headers that are read here."""
    return {name: value for name, value in headers.items() if name in _HEADERS}


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"it must be a whole number from {least} to {most}")
        return int(text)

    return read


def _milliseconds(least: int, most: int) -> Callable[[str], float]:
    whole = _whole(least, most)
    return lambda text: whole(text) / 1e3


def _yes(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text.lower() == "true"


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"it must be one of {', '.join(choices)}")
        return text

    return read


def _text(text: str) -> str:
    if not text or len(text) > LONGEST_TEXT:
        raise ValueError(f"it must have 1 to {LONGEST_TEXT} characters")
    return text


def _hex(length: int) -> Callable[[str], str]:
    def read(text: str) -> str:
        if len(text) != length or not set(text) <= set("0123456789abcdefABCDEF"):
            raise ValueError(f"it must be {length} hexadecimal digits")
        return text.lower()

    return read


def _list(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise ValueError("it must name something, with commas between")
    return found


def _ttl(text: str) -> int:
    seconds = _whole(0, MONTH)(text)
    if 0 < seconds < 60:
        raise ValueError("it must be 0 or at least 60")
    return seconds


def _old_ttl(text: str) -> int:
    """The older header was in milliseconds."""
    return _ttl(str(_whole(0, MONTH * 1000)(text) // 1000))


def _metadata(text: str) -> Metadata:
    found = _json_object(text)
    if len(found) > MOST_METADATA:
        raise ValueError(f"it must have at most {MOST_METADATA} entries")
    for name, value in found.items():
        if not isinstance(value, str | int | float | bool):
            raise ValueError(f"{name[:40]!r} must be a string, a number or a boolean")
    return found


def _custom_cost(text: str) -> CustomCost:
    found = _json_object(text)
    match sorted(found):
        case ["per_token_in", "per_token_out"]:
            return CustomCost(price=Price(_dollars(found["per_token_in"], 12), _dollars(found["per_token_out"], 12)))
        case ["total_cost"]:
            return CustomCost(micros=_dollars(found["total_cost"], 6))
    raise ValueError("it must have per_token_in and per_token_out, or total_cost")


def _dollars(value: object, scale: int) -> int:
    """Decimal, so that 0.1 is a tenth."""
    try:
        scaled = Decimal(str(value)).scaleb(scale)
        if isinstance(value, bool) or not scaled.is_finite() or not 0 <= scaled < 10**18:
            raise ValueError("a cost must be a number of dollars, not below 0")
    except InvalidOperation:
        raise ValueError("a cost must be a number of dollars, not below 0") from None
    return int(scaled.to_integral_value("ROUND_HALF_UP"))


def _json_object(text: str) -> dict[str, Any]:
    """Headers come as Latin-1; what was meant as UTF-8, as JSON is, can be told from it."""
    with suppress(UnicodeError):
        text = text.encode("latin-1").decode()
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except NOT_JSON as e:
        raise ValueError(f"it must be a JSON object ({e})") from e
    return found


_HEADERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "cf-aig-gateway-id": ("gateway_id", _text),
    "cf-cache-ttl": ("cache_ttl", _old_ttl),  # older names; where both are given the newer, which is read later, counts
    "cf-skip-cache": ("skip_cache", _yes),
    "cf-aig-cache-ttl": ("cache_ttl", _ttl),
    "cf-aig-skip-cache": ("skip_cache", _yes),
    "cf-aig-cache-key": ("cache_key", _text),
    "cf-aig-collect-log": ("collect_log", _yes),
    "cf-aig-collect-log-payload": ("collect_payload", _yes),
    "cf-aig-metadata": ("metadata", _metadata),
    "cf-aig-custom-cost": ("custom_cost", _custom_cost),
    "cf-aig-request-timeout": ("request_timeout", _milliseconds(1, 3_600_000)),
    "cf-aig-max-attempts": ("max_attempts", _whole(1, 5)),
    "cf-aig-retry-delay": ("retry_delay", _milliseconds(0, 5000)),
    "cf-aig-backoff": ("backoff", _one_of(*BACKOFFS)),
    "x-emberline-continue": ("continuation", _yes),
    "cf-aig-byok-alias": ("byok_alias", _text),
    "cf-aig-event-id": ("event_id", _text),
    "cf-aig-zdr": ("zdr", _yes),
    "cf-aig-no-wholesale": ("no_wholesale", _yes),
    "cf-aig-otel-trace-id": ("otel_trace_id", _hex(32)),
    "cf-aig-otel-parent-span-id": ("otel_parent_span_id", _hex(16)),
    "cf-aig-session-id": ("session_id", _text),
    "cf-aig-turn-id": ("turn_id", _text),
    "cf-aig-no-session-affinity": ("no_session_affinity", _yes),
    "cf-aig-allowed-models": ("allowed_models", _list),
    "cf-aig-allowed-providers": ("allowed_providers", _list),
}
