"""The bench of a simulated day: cells are independent, add up, and differ by routing policy."""

from __future__ import annotations

import pytest

from emberline.bench import sim_day
from emberline.sim.result import SimResult

PLAN = sim_day.DayPlan(workers=4, cell_workers=2, requests_per_worker=60.0, hours=1.0)


@pytest.fixture(scope="module")
def days() -> dict[str, SimResult]:
    return {name: sim_day._simulate_cell(PLAN, name, 0)[0] for name in sim_day.POLICIES}


def test_policies_get_the_same_requests(days: dict[str, SimResult]) -> None:
    assert len({day.requests for day in days.values()}) == 1, "all answered, whatever the policy"
    assert days["router"].requests == pytest.approx(2 * 60, rel=0.35)
    assert days["router"].cached_share > days["random"].cached_share + 0.05
    assert days["router"].worker_seconds == pytest.approx(2 * days["router"].seconds)


def test_cells_add_up_and_repeat(days: dict[str, SimResult]) -> None:
    first, second = days["router"], sim_day._simulate_cell(PLAN, "router", 1)[0]
    assert sim_day._simulate_cell(PLAN, "router", 0)[0] == first != second
    total = SimResult()
    total.merge(first)
    total.merge(second)
    assert total.output_tokens == first.output_tokens + second.output_tokens
    assert total.inter_token_seconds.count == first.inter_token_seconds.count + second.inter_token_seconds.count
    assert total.seconds == max(first.seconds, second.seconds)
    low, high = sorted(day.ttft_seconds.quantile(0.9) for day in (first, second))
    assert low <= total.ttft_seconds.quantile(0.9) <= high


def test_errors_are_relative_to_the_steps(days: dict[str, SimResult]) -> None:
    same = sim_day._relative_errors(days["router"], days["router"])
    assert set(same.values()) == {0.0}
    other = sim_day._relative_errors(days["router"], days["random"])
    router, random = days["router"].cached_share, days["random"].cached_share
    assert other["cached share"] == pytest.approx((router - random) / router)
