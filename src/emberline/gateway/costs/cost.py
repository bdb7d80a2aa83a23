"""What a request costs: whole micro-dollars (1 USD = 1,000,000), from a `Usage` and a `Price`.

Every token of the input is billed exactly once: as read from a cache, written to one, audio, image, or plain. A price
that is not known is None, and so is a cost that would need it; 0 is a statement (self-hosted).
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.gateway.costs.usage import Usage

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """Micro-dollars per million tokens. A kind of input without a price of its own costs what other input costs."""

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


def cost(usage: Usage, price: Price | None) -> int | None:
    """Exact: the sum is an integer of micro-dollars per million, rounded half up once."""
    if price is None:
        return None
    if price.long is not None and usage.input > price.long.above:
        price = price.long.price
    left, total = usage.input, usage.output * price.output
    if not (usage.cached_read or usage.cache_write or usage.audio or usage.image):  # as most
        return _micros(total + left * price.input)
    for tokens, own in _special(usage, price):
        billed = min(tokens, left)
        left -= billed
        total += billed * (price.input if own is None else own)
    return _micros(total + left * price.input)


def _special(usage: Usage, price: Price) -> tuple[tuple[int, int | None], ...]:
    long = price.cache_write if price.cache_write_long is None else price.cache_write_long
    return (
        (usage.cached_read, price.cached_read),
        (usage.cache_write_long, long),
        (usage.cache_write - usage.cache_write_long, price.cache_write),
        (usage.audio, price.audio),
        (usage.image, price.image),
    )


def _micros(per_million: int) -> int:
    return (per_million + MILLION // 2) // MILLION
