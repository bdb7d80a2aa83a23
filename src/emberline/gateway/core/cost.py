"""The cost of a request in whole micro-dollars (1 USD = 1,000,000), from a `Usage` and a `Price`.

Every input token is billed exactly once: as read from a cache, written to a cache, audio, image, or text. An unknown
price is None, and a cost that depends on an unknown price is None. A price of 0 is a known price, for example of a
self-hosted model.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.wire.usage import Usage

MILLION = 1_000_000
# Servers of the operator, whose requests no provider bills.
LOCAL_PROVIDERS = frozenset({"emberline", "ollama"})


@dataclass(frozen=True, slots=True)
class Price:
    """Prices in micro-dollars per million tokens.

    Cached, audio and image tokens without a price of their own cost as much as `input`.
    """

    input: int
    output: int
    cached_read: int | None = None
    cache_write: int | None = None
    audio: int | None = None
    image: int | None = None
    cache_write_long: int | None = None
    long: LongContextPrice | None = None


@dataclass(frozen=True, slots=True)
class LongContextPrice:
    """The price of a request whose input is longer than `above` tokens. It applies to all tokens of the request."""

    above: int
    price: Price


def compute_cost(usage: Usage, price: Price | None) -> int | None:
    """Return the cost in micro-dollars, or None if the price is unknown.

    The total is rounded once, half up.
    """
    if price is None:
        return None
    if price.long is not None and usage.input > price.long.above:
        price = price.long.price
    left, total = usage.input, usage.output * price.output
    if not (usage.cached_read or usage.cache_write or usage.audio or usage.image):  # the usual case
        return _round_to_micros(total + left * price.input)
    for tokens, own in _separately_priced_input(usage, price):
        billed = min(tokens, left)
        left -= billed
        total += billed * (price.input if own is None else own)
    return _round_to_micros(total + left * price.input)


def _separately_priced_input(usage: Usage, price: Price) -> tuple[tuple[int, int | None], ...]:
    """Return (token count, price) of each kind of input that may have its own price.

    The kinds are cached, audio and image tokens.
    """
    long = price.cache_write if price.cache_write_long is None else price.cache_write_long
    return (
        (usage.cached_read, price.cached_read),
        (usage.cache_write_long, long),
        (usage.cache_write - usage.cache_write_long, price.cache_write),
        (usage.audio, price.audio),
        (usage.image, price.image),
    )


def _round_to_micros(micros_times_million: int) -> int:
    return (micros_times_million + MILLION // 2) // MILLION
