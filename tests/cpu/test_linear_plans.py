"""Plans of GPU products, as far as they can be tested without a GPU."""

from __future__ import annotations

import pytest

from emberline.kernels.cuda import fp8_wide, linear, wide
from emberline.kernels.cuda.driver import count_sms

STRIDE = 160  # bytes of the header of 16 packed rows


@pytest.mark.parametrize("m", [1, 8, 16, 32])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096), (128256, 4096)])
def test_shared_memory_limits_ctas_per_sm(m: int, n: int, k: int) -> None:
    plan = linear.choose_plan(m, n, k, header_stride=STRIDE)
    assert plan.stages > 0 and plan.shared_bytes <= linear.MAX_SHARED_BYTES
    if plan.grid > count_sms():
        assert linear.MAX_SHARED_BYTES // plan.shared_bytes == 2, (
            "all of a grid at once, and not three of them in one place"
        )


def test_plain_weights_use_cublas_where_it_is_faster() -> None:
    taken = [m for m in range(33, 257) if wide.supports(m, 28672, 4096)]
    assert taken == [*range(33, 129), *range(161, 193), *range(wide.MIN_LARGE_ROWS, 257)]
    assert all(wide.supports(m, 28672, 4096, packed=True) for m in range(33, 257))


def test_plans_fit_a_gpu_with_fewer_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, wide):
        monkeypatch.setattr(module, "count_sms", lambda: 78)
    assert linear.make_plan(28672, 4096, 2, 1).grid <= 78
    assert wide.make_plan(64, 28672, 4096, wide.TileConfig(2)).grid <= 78
    assert wide.count_clusters(2) == 39


@pytest.mark.parametrize("sms", [78, 114, 132])
def test_measured_plans_can_exchange_sums_on_any_gpu(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "count_sms", lambda: sms)
    measured = {size: row for size, row in wide.MEASURED_PACKED.items() if row.unclustered}
    assert measured
    for size, row in measured.items():
        assert wide.make_plan(*size, row, packed=True).can_exchange_sums, size
    for (columns, n, k), row in fp8_wide.MEASURED.items():
        if row.unclustered:
            assert wide.make_plan(columns, n, k // 2, row).can_exchange_sums, (columns, n, k)
