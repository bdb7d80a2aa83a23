"""Placement of experts: every expert has a slot, hot ones get copies, and experts stay where they can."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.core.events import ExpertStats, Stats
from emberline.core.plan import WorkItem
from emberline.engine.ranks.expert_balancer import CHECK_INTERVAL_S, ExpertBalancer
from emberline.engine.ranks.expert_moves import decode_moves, encode_moves
from emberline.engine.ranks.work_codec import WorkEncoder
from emberline.models.expert_placement import (
    EMPTY_SLOT,
    Placement,
    group_loads,
    keep_expert_slots,
    list_moved_experts,
    place_experts,
    place_in_order,
)
from emberline.models.expert_row_counts import RECENT_ROWS, ExpertRowCounts, measure_imbalance
from emberline.server.metrics import render_exposition
from emberline.worker.rank_metrics import build_expert_metrics


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], int, int]:
    """Loads at several times, the number of groups, and the slots of a group."""
    groups, each = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    loads = st.lists(
        st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 1000)), min_size=groups * each, max_size=groups * each
    )
    return draw(st.lists(loads, min_size=1, max_size=3)), groups, each + draw(st.integers(0, 3))


def check(placement: Placement, experts: int, groups: int, slots: int) -> None:
    assert len(placement) == groups and all(len(each) == slots for each in placement)
    for each in placement:
        used = [expert for expert in each if expert != EMPTY_SLOT]
        assert len(used) == len(set(used)), "a group has two copies of an expert"
    assert {expert for each in placement for expert in each} - {EMPTY_SLOT} == set(range(experts))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_expert_is_placed_and_the_load_never_gets_worse(case: tuple[list[list[int]], int, int]) -> None:
    series, groups, slots = case
    experts = len(series[0])
    placement = in_order = place_in_order(experts, groups, slots)
    check(placement, experts, groups, slots)
    for loads in series:
        before, placement = placement, place_experts(loads, placement)
        check(placement, experts, groups, slots)
        worst = max(group_loads(loads, placement))
        assert worst <= max(group_loads(loads, in_order)) + 1e-9 and worst <= max(group_loads(loads, before)) + 1e-9
        assert abs(sum(group_loads(loads, placement)) - sum(loads)) < 1e-6


def test_a_hot_expert_gets_copies() -> None:
    loads = [1.0] * 8
    loads[3] = 21.0  # of 28: without a copy, its group has 24
    placement = place_experts(loads, place_in_order(8, 2, 5))
    assert sum(3 in group for group in placement) == 2
    assert group_loads(loads, placement) == [14.0, 14.0]
    without = place_experts(loads, place_in_order(8, 2, 4))
    assert max(group_loads(loads, without)) == 24.0  # four experts in each group: copies have no room


def test_experts_stay_where_they_can() -> None:
    current: Placement = ((0, 1, EMPTY_SLOT), (2, 3, EMPTY_SLOT))
    assert keep_expert_slots(current, ((3, 2, 0), (0, 1, EMPTY_SLOT))) == ((0, 1, EMPTY_SLOT), (2, 3, 0))
    copied = place_experts([9, 1, 0, 1], current)
    assert copied == ((0, 1, EMPTY_SLOT), (2, 3, 0)) and list_moved_experts(current, copied) == [(1, 0)]
    assert place_experts([9, 1, 0, 1], copied) is copied
    assert place_experts([1, 0, 9, 1], copied) == ((0, 1, 2), (2, 3, EMPTY_SLOT))  # the copy that is not needed goes


def test_load_is_counted_by_expert_and_group() -> None:
    load = ExpertRowCounts(4, 2)
    experts = np.array([[0, 3], [0, 1], [0, 2]])
    load.record(experts, experts // 2)
    assert load.recent.tolist() == [3, 1, 1, 1] and load.rows_by_group.tolist() == [4, 2]
    even = ExpertRowCounts(4, 2)
    even.record(experts[:1], experts[:1] // 2)
    assert measure_imbalance([load, even]) == (4 + 1) * 2 / (6 + 2)
    assert measure_imbalance([ExpertRowCounts(4, 2)]) == 1.0
    many = np.zeros((RECENT_ROWS, 1), np.int64)
    load.record(many, many)
    assert load.recent[0] == (RECENT_ROWS + 3) // 2 and load.rows_by_group[0] == RECENT_ROWS + 4


def test_statistics_and_metrics() -> None:
    one, two = Stats(experts=ExpertStats([6, 2], 1.5, 1)), Stats(experts=ExpertStats([1, 1, 4], 2.0))
    assert Stats.total([one, two, Stats()]).experts == ExpertStats([7, 3, 4], 2.0, 1)
    assert one.experts is not None
    text = render_exposition(list(build_expert_metrics('model="m"', one.experts)))
    for line in (
        'emberline:rank_expert_rows_total{model="m",rank="0"} 6',
        'emberline:rank_expert_rows_total{model="m",rank="1"} 2',
        'emberline:expert_imbalance{model="m"} 1.5',
        'emberline:experts_moved_total{model="m"} 1',
    ):
        assert line in text.splitlines()


class Layer:
    """The experts of a layer, as ExpertBalancer sees them."""

    def __init__(self, rows: list[int]) -> None:
        self.placement, self.expert_row_counts = (
            place_in_order(len(rows), 2, len(rows) // 2 + 1),
            ExpertRowCounts(len(rows), 2),
        )
        numbers = np.repeat(np.arange(len(rows)), rows)[:, None]
        self.expert_row_counts.record(numbers, numbers // (len(rows) // 2))


def test_experts_move_after_some_time_if_the_load_is_uneven() -> None:
    clock = ManualClock()
    layers = {1: Layer([50, 10, 10, 10]), 4: Layer([20, 20, 20, 20])}
    balancer = ExpertBalancer(layers, clock)
    assert not balancer.is_due  # too early
    clock.advance(CHECK_INTERVAL_S)
    assert balancer.is_due
    found = balancer.choose_move()
    assert found is not None and found[0] == 1 and sum(0 in group for group in found[1]) == 2
    assert balancer.is_due and balancer.choose_move() is None  # the load of layer 4 is even
    assert not balancer.is_due
    clock.advance(CHECK_INTERVAL_S)
    balancer.stop()
    clock.advance(CHECK_INTERVAL_S)
    assert not balancer.is_due


def test_experts_stay_if_the_load_is_even_or_little_is_known() -> None:
    clock = ManualClock()
    balancers = [ExpertBalancer({0: Layer(rows)}, clock) for rows in ([21, 20, 20, 20], [15, 1, 1, 1])]
    clock.advance(CHECK_INTERVAL_S)
    assert not any(balancer.is_due for balancer in balancers)


def test_moves_are_messages_that_differ_from_work() -> None:
    moves = {3: ((0, 1, EMPTY_SLOT), (2, 3, 0))}
    assert decode_moves(encode_moves(moves)) == moves
    assert decode_moves(WorkEncoder(1).encode([WorkItem("r", 0, [5], [1], samples=True)])) is None
