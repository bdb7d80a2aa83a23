"""Checked: what must hold of a gateway's settings beyond what each part says for itself. The file's are checked at the
start and the management API's when they come, so that nobody learns of a slip by calls that fail."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from emberline.core.errors import InvalidRequest
from emberline.gateway.costs.cost import Price
from emberline.gateway.limits.claims import rules_of, warn_of_caller_splits
from emberline.gateway.providers.registry import KNOWN, Registry
from emberline.gateway.settings import Settings
from emberline.gateway.upstream.ssrf import checked_url

LONGEST = 3650  # days that a log is kept
CUSTOM = "custom-"  # providers of the account's own, which come and go
DEAREST = 10**12  # micro-dollars per million tokens
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_FRAMING = ("host", "connection", "content-length", "transfer-encoding")  # of each request, by itself
_AMOUNTS = ("input", "output", "cached_read", "cache_write", "cache_write_long", "audio", "image")


def check_settings(settings: Settings, *, allow_private: bool = True) -> None:
    """InvalidRequest, which says of which gateway. `allow_private`: providers may be in this network."""
    try:
        _check_numbers(settings)
        rules_of(settings)
        warn_of_caller_splits(settings)
        for name, price in settings.prices.items():
            check_price(price, f"prices.{name}.")
        for slug, provider in settings.providers.items():
            check_headers(provider.headers, f"providers.{slug}.headers")
            if provider.base_url is not None:
                checked_url(provider.base_url, allow_private=allow_private, param=f"providers.{slug}.base_url")
            if provider.enabled:
                Registry().find(slug, settings)
        known = {*KNOWN, *settings.providers}
        for param, slug in _sent_to(settings):
            if slug not in known and not slug.startswith(CUSTOM):
                hint = f"known are {', '.join(sorted(known))}"
                raise InvalidRequest(f"{param} names {slug[:80]!r}, which is no provider", param=param, hint=hint)
    except InvalidRequest as e:
        raise InvalidRequest(f"gateway {settings.gateway!r}: {e.message}", param=e.param, hint=e.hint) from e


def _check_numbers(settings: Settings) -> None:
    breaker = settings.breaker
    for param, fits, must in (
        ("cache_ttl", settings.cache_ttl >= 0, "must not be below 0"),
        ("logs.days", 1 <= settings.logs.days <= LONGEST, f"must be from 1 to {LONGEST}"),
        ("breaker.failures", breaker.failures >= 1, "must be at least 1"),
        ("breaker.pause", 0 < breaker.pause <= 30, "must be above 0 and at most 30 seconds"),
    ):
        if not fits:
            raise InvalidRequest(f"{param} {must}", param=param)


def _sent_to(settings: Settings) -> Iterator[tuple[str, str]]:
    """Every provider that calls may be sent to by these settings, and which of them says so."""
    yield "default_provider", settings.default_provider
    for fallback in settings.fallbacks:
        for target in fallback.to:
            yield "fallbacks.to", target.partition("/")[0]
    for name, pool in settings.pools.items():
        for member in pool.members:
            yield f"pools.{name}.members", member.provider
    for judge in settings.guardrails.judges:
        yield "guardrails.judges", judge.provider


def check_price(price: Price | None, at: str = "") -> None:
    while price is not None:
        for name in _AMOUNTS:
            amount = getattr(price, name)
            if amount is not None and not 0 <= amount <= DEAREST:
                raise InvalidRequest(
                    f"{at}{name} must be micro-dollars per million tokens, not below 0", param=f"{at}{name}"
                )
        price = price.long.price if price.long is not None else None


def check_headers(headers: Mapping[str, str], param: str = "headers") -> None:
    """Those that are sent with every request to a provider."""
    for name, value in headers.items():
        fits = _HEADER.fullmatch(name) and value.isascii() and value.isprintable() and name.lower() not in _FRAMING
        if not fits:
            raise InvalidRequest(f"{name[:80]!r} with this value cannot be a header", param=param)
