"""Which kernel computes a sum, by its size and the number of ranks.

The limits are computed, not measured. With N ranks and B bytes, one-shot reads (N - 1) B from other GPUs and two-shot
2 (N - 1) B / N, after one more barrier. With 450 GB/s of NVLink and 2 us for a barrier, both take the same
time at 600 KB for 4 ranks and at 170 KB for 8. That agrees with the published times of vLLM's all-reduce on H200, which
grow from 64 KiB to 512 KiB from 5.4 to 10.5 us on 4 GPUs, and from 6.6 to 11.1 us on 8.
`python -m emberline.bench.gpu collectives` measures both kernels.
"""

from __future__ import annotations

# The most bytes that one-shot sums, by the largest number of ranks. With two ranks, two-shot has no advantage.
ONE_SHOT_MAX_BYTES = {2: 1 << 62, 4: 512 << 10, 8: 160 << 10}


def prefers_two_shot(nbytes: int, ranks: int) -> bool:
    """Return whether the two-shot kernel sums tensors of `nbytes` on each rank faster than the one-shot kernel."""
    return nbytes > next(limit for most, limit in ONE_SHOT_MAX_BYTES.items() if ranks <= most)
