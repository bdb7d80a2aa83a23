"""Published times of collectives among H200 GPUs, from the tables of NVIDIA's aiconfigurator (vLLM 0.24's kernel)."""

from __future__ import annotations

from bisect import bisect_left

# Microseconds of an all-reduce of bfloat16 numbers in a CUDA graph, by the count of GPUs and the count of numbers.
ALL_REDUCE_US: dict[int, dict[int, float]] = {
    2: {4096: 4.6, 32768: 4.8, 262144: 6.3, 1048576: 12.4},
    4: {4096: 4.8, 32768: 5.4, 262144: 10.5, 1048576: 17.8},
    8: {4096: 5.1, 32768: 6.6, 262144: 11.1, 1048576: 18.1},
}


def all_reduce_us(elements: int, ranks: int) -> float:
    """Return the microseconds of an all-reduce, interpolated or, for large sizes, extrapolated from published times."""
    times = ALL_REDUCE_US[ranks]
    sizes = sorted(times)
    if elements <= sizes[0]:
        return times[sizes[0]]
    right = min(bisect_left(sizes, elements), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    return times[low] + (elements - low) * (times[high] - times[low]) / (high - low)
