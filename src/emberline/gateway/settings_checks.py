"""Checks of a gateway's settings that the types of single fields cannot express.

Settings in the configuration file are checked at the start, settings from the management API when they are stored. A
mistake is therefore reported at once, not by requests that fail later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from emberline.core.errors import InvalidRequest
from emberline.core.header_texts import HEADER_NAME
from emberline.gateway.core.cost import Price
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.limits.claims import parse_limit_rules, warn_about_evadable_limits
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG, ProviderRegistry
from emberline.gateway.upstream.ssrf import validate_provider_url

MAX_LOG_DAYS = 3650  # days that a log is kept
CUSTOM_PREFIX = "custom-"  # before the slug of an account's own providers, which may be created and deleted at any time
MAX_PRICE_MICROS = 10**12  # micro-dollars per million tokens
_FRAMING = ("host", "connection", "content-length", "transfer-encoding")  # set by the HTTP client for each request
_AMOUNTS = ("input", "output", "cached_read", "cache_write", "cache_write_long", "audio", "image")


def check_settings(settings: GatewaySettings, *, allow_private: bool = True) -> None:
    """Raise InvalidRequest, with the gateway's name in the message, if the settings are inconsistent.

    `allow_private`: provider addresses may be in private networks.
    """
    try:
        _check_number_ranges(settings)
        parse_limit_rules(settings)
        warn_about_evadable_limits(settings)
        for name, price in settings.prices.items():
            check_price(price, f"prices.{name}.")
        for slug, provider in settings.providers.items():
            check_headers(provider.headers, f"providers.{slug}.headers")
            if provider.base_url is not None:
                validate_provider_url(
                    provider.base_url, allow_private=allow_private, param=f"providers.{slug}.base_url"
                )
            if provider.enabled:
                ProviderRegistry().find_provider(slug, settings)
        known = {*PROVIDERS_BY_SLUG, *settings.providers}
        for param, slug in _referenced_providers(settings):
            if slug not in known and not slug.startswith(CUSTOM_PREFIX):
                hint = f"known providers: {', '.join(sorted(known))}"
                raise InvalidRequest(f"{param} names an unknown provider {slug[:80]!r}", param=param, hint=hint)
    except InvalidRequest as e:
        raise InvalidRequest(f"gateway {settings.gateway!r}: {e.message}", param=e.param, hint=e.hint) from e


def _check_number_ranges(settings: GatewaySettings) -> None:
    breaker = settings.breaker
    for param, value, is_valid, rule in (
        ("cache_ttl", settings.cache_ttl, settings.cache_ttl >= 0, "0 seconds or more"),
        ("logs.days", settings.logs.days, 1 <= settings.logs.days <= MAX_LOG_DAYS, f"from 1 to {MAX_LOG_DAYS}"),
        ("breaker.failures", breaker.failures, breaker.failures >= 1, "at least 1"),
        ("breaker.pause", breaker.pause, 0 < breaker.pause <= 30, "above 0 and at most 30 seconds"),
    ):
        if not is_valid:
            raise InvalidRequest(f"{param} must be {rule}, not {value}", param=param)


def _referenced_providers(settings: GatewaySettings) -> Iterator[tuple[str, str]]:
    """Yield (setting, provider) for every provider that requests may be sent to.

    `setting` is the name of the setting that refers to the provider.
    """
    yield "default_provider", settings.default_provider
    for fallback in settings.fallbacks:
        for target in fallback.to:
            yield "fallbacks.to", target.partition("/")[0]
    for name, pool in settings.pools.items():
        for member in pool.members:
            yield f"pools.{name}.members", member.provider
    for judge in settings.guardrails.judges:
        yield "guardrails.judges", judge.provider


def check_price(price: Price | None, prefix: str = "") -> None:
    """Raise InvalidRequest if a price is out of range.

    `prefix` is put before the field's name in the message.
    """
    while price is not None:
        for name in _AMOUNTS:
            amount = getattr(price, name)
            if amount is not None and not 0 <= amount <= MAX_PRICE_MICROS:
                raise InvalidRequest(
                    f"{prefix}{name} must be from 0 to {MAX_PRICE_MICROS} (micro-dollars per million tokens),"
                    f" not {amount}",
                    param=f"{prefix}{name}",
                )
        price = price.long.price if price.long is not None else None


def check_headers(headers: Mapping[str, str], param: str = "headers") -> None:
    """Raise InvalidRequest if a header is not allowed in requests to a provider."""
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name):
            reason = "the name has characters that HTTP does not allow"
        elif name.lower() in _FRAMING:
            reason = "the gateway sets this header itself for each request"
        elif not (value.isascii() and value.isprintable()):
            reason = "the value must be printable ASCII"
        else:
            continue
        raise InvalidRequest(f"header {name[:80]!r} cannot be sent to a provider: {reason}", param=param)
