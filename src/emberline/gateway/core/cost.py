"""The cost of a request in whole micro-dollars (1 USD = 1,000,000), from a `Usage` and a `Price`.

Every input token is billed exactly once: as read from a cache, written to a cache, audio, image, or text. An unknown
price is None, and so is a cost that needs it; a price of 0 is a known price (self-hosted models).
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.wire.usage import Usage

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """Micro-dollars per million tokens. Cached, audio and image tokens without a price cost `input`."""

    input: int
    output: int
    cached_read: int | None = None
    cache_write: int | None = None
    audio: int | None = None
    image: int | None = None
    cache_write_long: int | None = None
    long: LongPrice | None = None


@dataclass(frozen=True, slots=True)
class LongPrice:
    """The price of a whole request whose input is longer than `above` tokens."""

    above: int
    price: Price


def compute_cost(usage: Usage, price: Price | None) -> int | None:
    """Return the cost in micro-dollars, or None if the price is unknown. It is rounded half up once."""
    if price is None:
        return None
    if price.long is not None and usage.input > price.long.above:
        price = price.long.price
    left, total = usage.input, usage.output * price.output
    if not (usage.cached_read or usage.cache_write or usage.audio or usage.image):  # the usual case
        return _round_to_micros(total + left * price.input)
    for tokens, own in _special_input(usage, price):
        billed = min(tokens, left)
        left -= billed
        total += billed * (price.input if own is None else own)
    return _round_to_micros(total + left * price.input)


def _special_input(usage: Usage, price: Price) -> tuple[tuple[int, int | None], ...]:
    """Return tokens and price of each kind of input that may have its own price."""
    long = price.cache_write if price.cache_write_long is None else price.cache_write_long
    return (
        (usage.cached_read, price.cached_read),
        (usage.cache_write_long, long),
        (usage.cache_write - usage.cache_write_long, price.cache_write),
        (usage.audio, price.audio),
        (usage.image, price.image),
    )


def _round_to_micros(per_million: int) -> int:
    return (per_million + MILLION // 2) // MILLION
