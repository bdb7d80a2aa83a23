"""Simulated cluster: no request is lost, time follows the cost model, and affinity increases cache hits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emberline.core.plan import StepPlan, WorkItem
from emberline.router.kvindex import KVIndexState
from emberline.sim.choosers import choose_worker_by_policy, make_random_chooser
from emberline.sim.cluster import SimCluster, SimClusterConfig
from emberline.sim.costmodel import CostModel
from emberline.sim.oracle import PrefixOracle
from emberline.sim.prompt import PromptSegment, SimPromptBuilder, SimRequest
from emberline.sim.result import SimResult
from emberline.sim.sharedstore import SharedStore
from emberline.sim.worker import SimStore
from emberline.sim.workloads.agents import AgentWorkload

WORKLOAD = AgentWorkload(
    num_sessions=12, systems=2, system_tokens=(200, 300), turns=(4, 6), user_tokens=40, reply_tokens=12, over_seconds=20
)
CLUSTER = SimClusterConfig(workers=3, kv_tokens=4096, max_running=8, batch_tokens=256)


@pytest.fixture(scope="module")
def run_without_events() -> SimResult:
    return SimCluster(CLUSTER, choose_worker_by_policy).run(WORKLOAD.sessions(1))


def test_every_turn_is_answered_once(run_without_events: SimResult) -> None:
    turns = sum(session.turns_left for session in WORKLOAD.sessions(1))
    assert run_without_events.requests == turns == run_without_events.ttft_seconds.count
    assert run_without_events.seconds > max(session.starts_at for session in WORKLOAD.sessions(1))


def test_same_seed_gives_the_same_run(run_without_events: SimResult) -> None:
    assert SimCluster(CLUSTER, choose_worker_by_policy).run(WORKLOAD.sessions(1)) == run_without_events


def test_affinity_caches_more_than_random_routing(run_without_events: SimResult) -> None:
    random = SimCluster(CLUSTER, make_random_chooser(1)).run(WORKLOAD.sessions(1))
    assert run_without_events.cached_share > random.cached_share + 0.1
    assert run_without_events.cached_share <= run_without_events.oracle_cached_share


@pytest.mark.parametrize("begin_s", [5.0, 60.0])  # all sessions at once, and one after another
def test_shared_system_prompt_does_not_overload_one_worker(begin_s: float) -> None:
    talks = AgentWorkload(
        num_sessions=30,
        systems=1,
        system_tokens=(600, 600),
        turns=(2, 3),
        user_tokens=30,
        reply_tokens=20,
        think_seconds=1,
    )
    slow = SimClusterConfig(
        workers=3, kv_tokens=16_384, max_running=16, batch_tokens=256, cost=CostModel(0.03, 1.5e-3, 2e-6)
    )
    plain, named = (
        SimCluster(slow, choose_worker_by_policy, sends_session_ids=header).run(
            replace(talks, over_seconds=begin_s).sessions(1)
        )
        for header in (False, True)
    )
    assert plain.conversation_imbalance(3) <= 1.5, plain.conversations_by_worker
    assert plain.cached_share > named.cached_share - 0.01, "as much as where clients name their session"


def test_kv_events_increase_cache_hits() -> None:
    """Compares the mean of three seeds: over 12 seeds the gain is 0.014 to 0.064, and 0.036 on average."""
    crowd, small = replace(WORKLOAD, num_sessions=40, systems=3, turns=(3, 4)), replace(CLUSTER, kv_tokens=1024)
    margins = []
    for seed in (1, 2, 3):
        run_without_events = SimCluster(small, choose_worker_by_policy).run(crowd.sessions(seed))
        aware = SimCluster(small, choose_worker_by_policy, kv_events=True)
        seen = aware.run(crowd.sessions(seed))
        assert seen.cached_share <= seen.oracle_cached_share
        margins.append(seen.cached_share - run_without_events.cached_share)
        assert aware.dispatch.kv_index is not None
        for worker in aware.dispatch.workers.values():
            assert aware.dispatch.kv_index.state(worker.id) is KVIndexState.EXACT
    assert sum(margins) / len(margins) > 0.03, margins


def test_shared_store_saves_nearly_all_at_any_worker() -> None:
    store = SimStore(SharedStore(1 << 16), 1e-5)
    seen = SimCluster(CLUSTER, make_random_chooser(1), store=store).run(WORKLOAD.sessions(1))
    assert 0.9 * seen.oracle_cached_share < seen.cached_share <= seen.oracle_cached_share


def test_full_store_evicts_least_recently_used_blocks() -> None:
    store = SharedStore(2)
    store.store([b"a", b"b"], [])
    store.load([b"a"], [])
    store.store([b"c"], [])
    assert [store.lookup([name]) for name in (b"a", b"b", b"c")] == [1, 0, 1]
    assert store.stats().evicted_blocks == 1


def test_step_costs_the_maximum_of_reading_and_multiplying() -> None:
    cost = CostModel(step=1.0, token=0.01, context=0.001)
    assert cost.estimate_step_seconds(_plan(tokens=1, start=99)) == pytest.approx(1.1)
    assert cost.estimate_step_seconds(_plan(tokens=200, start=0)) == pytest.approx(2.2)


def test_oracle_counts_full_blocks_without_the_last_token() -> None:
    oracle = PrefixOracle(block_size=4)
    assert oracle.count_cached_and_add(_request("a", ("system", 6), ("first", 4))) == 0
    assert oracle.count_cached_and_add(_request("a", ("system", 6), ("first", 4))) == 8, "10 tokens, without the last"
    assert oracle.count_cached_and_add(_request("b", ("system", 6), ("other", 20))) == 4
    again = _request("b", ("system", 6), ("first", 4), ("a/reply", 5), ("next", 2))
    assert oracle.count_cached_and_add(again) == 12, "a reply is cached too"


def _request(name: str, *parts: tuple[str, int]) -> SimRequest:
    prompt = SimPromptBuilder()
    for key, num_tokens in parts:
        prompt.add(PromptSegment(key, num_tokens))
    return prompt.build_request(name, PromptSegment(f"{name}/reply", 5))


def _plan(tokens: int, start: int) -> StepPlan:
    return StepPlan(1, (), [WorkItem("a", start, [1] * tokens, [0], samples=True)], ())
