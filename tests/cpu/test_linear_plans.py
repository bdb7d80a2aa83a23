"""Plans of GPU products, as far as they can be tested without a GPU."""

from __future__ import annotations

import pytest

from emberline.kernels.cuda import linear, wide

STRIDE = 160  # bytes of the header of 16 packed rows


@pytest.mark.parametrize("m", [1, 8, 16, 32])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096), (128256, 4096)])
def test_shared_memory_limits_ctas_per_sm(m: int, n: int, k: int) -> None:
    plan = linear.choose_plan(m, n, k, header_stride=STRIDE)
    assert plan.stages > 0 and plan.shared_bytes <= linear.MAX_SHARED_BYTES
    if plan.grid > linear.NUM_SMS:
        assert linear.MAX_SHARED_BYTES // plan.shared_bytes == 2, (
            "all of a grid at once, and not three of them in one place"
        )


def test_plain_weights_use_cublas_where_it_is_faster() -> None:
    taken = [m for m in range(33, 257) if wide.supports(m, 28672, 4096)]
    assert taken == [*range(33, 129), *range(161, 193), *range(wide.MIN_LARGE_ROWS, 257)]
    assert all(wide.supports(m, 28672, 4096, packed=True) for m in range(33, 257))
