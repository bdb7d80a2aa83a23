"""Costs are exact integers: each token is billed once, rounded once, and an unknown cost is None."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from emberline.gateway.core.cost import LongContextPrice, Price, compute_cost
from emberline.wire.usage import Usage

MINI = Price(input=750_000, cached_read=75_000, output=4_500_000)


def test_cached_tokens_cost_less() -> None:
    """In cloudflare/ai#550 a cache hit was billed 2,007.3 micro-dollars and a miss 1,834.5."""
    miss = Usage(input=2422, output=4)
    hit = Usage(input=2422, cached_read=2304, output=4)
    assert miss.input * MINI.input + miss.output * MINI.output == 1_834_500_000
    assert compute_cost(miss, MINI) == 1835  # 1,834.5, rounded half up
    assert (2422 - 2304) * 750_000 + 2304 * 75_000 + 4 * 4_500_000 == 279_300_000
    assert compute_cost(hit, MINI) == 279


def test_unknown_price_has_no_cost() -> None:
    assert compute_cost(Usage(input=10**9), None) is None
    assert compute_cost(Usage(input=10**9, output=5), Price(input=0, output=0)) == 0


def test_kind_without_price_costs_input_price() -> None:
    usage = Usage(input=1000, cached_read=100, cache_write=200, audio=300, image=400)
    assert compute_cost(usage, Price(input=1_000_000, output=0)) == 1000


def test_every_kind_has_its_own_price() -> None:
    price = Price(
        input=3_000_000,
        output=15_000_000,
        cached_read=300_000,
        cache_write=3_750_000,
        cache_write_long=6_000_000,
        audio=9_000_000,
        image=4_000_000,
    )
    usage = Usage(
        input=10_000, cached_read=1000, cache_write=3000, cache_write_long=2000, audio=500, image=100, output=10
    )
    by_hand = 1000 * 3 // 10 + 1000 * 15 // 4 + 2000 * 6 + 500 * 9 + 100 * 4 + 5400 * 3 + 10 * 15
    assert compute_cost(usage, price) == by_hand


def test_long_prompt_has_long_price() -> None:
    price = Price(input=1_250_000, output=10_000_000, long=LongContextPrice(200_000, Price(2_500_000, 15_000_000)))
    assert compute_cost(Usage(input=200_000, output=100), price) == 250_000 + 1000
    assert compute_cost(Usage(input=200_001, output=100), price) == 500_003 + 1500  # 500,002.5, rounded half up


COUNTS = st.integers(0, 10**7)
PRICES = st.integers(0, 10**9)


@given(st.tuples(*[COUNTS] * 6), st.tuples(PRICES, PRICES), st.tuples(*[st.none() | PRICES] * 5))
def test_cost_equals_exact_fractions(
    counts: tuple[int, ...], plain: tuple[int, int], own: tuple[int | None, ...]
) -> None:
    """Compare with exact fractions, for parts that do not overlap."""
    text, read, short, long, audio, output = counts
    usage = Usage(
        input=text + read + short + long + audio,
        cached_read=read,
        cache_write=short + long,
        cache_write_long=long,
        audio=audio,
        output=output,
    )
    price = Price(plain[0], plain[1], *own)
    write = price.input if price.cache_write is None else price.cache_write
    rates = {
        "read": (read, price.input if price.cached_read is None else price.cached_read),
        "short": (short, write),
        "long": (long, write if price.cache_write_long is None else price.cache_write_long),
        "audio": (audio, price.input if price.audio is None else price.audio),
        "text": (text, price.input),
        "output": (output, price.output),
    }
    exact = sum(Fraction(tokens * rate, 10**6) for tokens, rate in rates.values())
    assert compute_cost(usage, price) == int(exact + Fraction(1, 2))


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_overlapping_parts_are_billed_once(input: int, read: int, audio: int, image: int) -> None:
    usage = Usage(input=input, cached_read=min(read, input), audio=min(audio, input), image=min(image, input))
    price = Price(1_000_000, 0, cached_read=1_000_000, audio=1_000_000, image=1_000_000)
    assert compute_cost(usage, price) == input
