"""Simulated workers start, drain and die: every request ends once, and streams continue at other workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emberline.core.config import RouterConfig
from emberline.core.errors import NotFound
from emberline.sim.cluster import SimCluster, SimClusterConfig, SimDetail
from emberline.sim.costmodel import CostModel
from emberline.sim.job import JobOutput
from emberline.sim.link import KVLink, KVSource, count_overlapped_tokens
from emberline.sim.prompt import PromptSegment, SimPromptBuilder, SimRequest
from emberline.sim.result import RequestRecord
from emberline.sim.sessions import SingleRequest

STEP_S = 0.01
COST = CostModel(step=STEP_S, token=1e-4, context=0.0)
CONFIG = SimClusterConfig(workers=2, kv_tokens=8192, max_running=8, batch_tokens=256, cost=COST)


def single(number: int, starts_at: float = 0.0, prompt: int = 64, output: int = 101) -> SingleRequest:
    builder = SimPromptBuilder()
    builder.add(PromptSegment(f"prompt-{number}", prompt))
    return SingleRequest(
        starts_at, builder.build_request(f"request-{number}", PromptSegment(f"reply-{number}", output))
    )


def make_cluster(config: SimClusterConfig = CONFIG) -> tuple[SimCluster, list[RequestRecord]]:
    cluster, records = SimCluster(config), list[RequestRecord]()
    cluster.observers.append(records.append)
    return cluster, records


def test_times_follow_the_cost_model() -> None:
    cluster, records = make_cluster()
    result = cluster.run([single(0, starts_at=3.0)])
    [record] = records
    assert record.first_token_at == pytest.approx(3.0 + STEP_S)
    assert record.finished_at == pytest.approx(3.0 + 101 * STEP_S)
    assert result.inter_token_seconds.count == 100
    assert result.inter_token_seconds.quantile(0.9) == pytest.approx(STEP_S, rel=0.003)
    assert result.worker_seconds == pytest.approx(2 * record.finished_at)
    assert result.busy_seconds == pytest.approx(101 * STEP_S)


@pytest.mark.parametrize("detail", ["steps", "runs"])
def test_heartbeats_do_not_report_a_step_before_it_ends(detail: SimDetail) -> None:
    """The router would take the prompts of a running step for computed, and send their worker more than others."""
    cost = CostModel(step=4.0, token=0.0, context=0.0)
    cluster, _ = make_cluster(replace(CONFIG, workers=1, cost=cost, detail=detail))
    [worker] = cluster.workers.values()
    seen: list[tuple[int, float]] = []

    def record_counters() -> None:
        counters = worker.model.counters()
        seen.append((counters.prompt_tokens, counters.busy_seconds))

    for second in (2.0, 6.0):
        cluster.call_at(second, record_counters)
    cluster.run([single(0, starts_at=1.0, output=2)])
    assert seen == [(0, 0.0), (64, 4.0)]


@pytest.mark.parametrize("detail", ["steps", "runs"])
def test_resumed_requests_compute_no_prompt(detail: SimDetail) -> None:
    """Of 101 tokens 91 are known, with their KV blocks: the rest takes 10 steps, even with a prefill worker."""
    cluster, records = make_cluster(replace(CONFIG, prefill_workers=1, detail=detail))
    session = single(0, prompt=4096)
    session.request = replace(session.request, num_resumed=91)
    result = cluster.run([session])
    assert records[0].finished_at == pytest.approx(10 * STEP_S, rel=0.15)  # with a copy without bytes
    assert result.handoffs == 0 and result.inter_token_seconds.count == 9


def test_requests_of_a_killed_worker_continue_elsewhere() -> None:
    cluster, records = make_cluster()
    cluster.call_at(0.5, lambda: cluster.kill_worker("worker-0"))
    result = cluster.run([single(i) for i in range(6)])
    moved = [record for record in records if record.moves]
    assert len(records) == 6 and {record.outcome for record in records} == {"answered"}
    assert len(moved) == 3 and {record.worker for record in records} == {"worker-1"}
    # The moved ones recompute prompt and output, but generate no token twice.
    assert result.output_tokens == 6 * 101
    assert result.inter_token_seconds.count == 6 * 100
    assert max(record.finished_at for record in moved) < 1.3


def test_last_worker_killed_lets_requests_wait_then_fail() -> None:
    cluster, records = make_cluster(SimClusterConfig(workers=1, kv_tokens=8192, batch_tokens=256, cost=COST))
    cluster.call_at(0.5, lambda: cluster.kill_worker("worker-0"))
    cluster.run([single(0), single(1, starts_at=2.0)])
    assert [(record.outcome, round(record.finished_at, 3)) for record in records] == [
        ("failed", 10.5),
        ("failed", 12.0),
    ]
    assert records[0].output_tokens == 49, "tokens of the step that was cut short are lost"


def test_new_worker_serves_waiting_requests_after_its_start() -> None:
    cluster, records = make_cluster(SimClusterConfig(workers=0, kv_tokens=8192, batch_tokens=256, cost=COST))
    cluster.call_at(1.0, lambda: cluster.add_worker(start_seconds=4.0))
    result = cluster.run([single(0)])
    assert records[0].first_token_at == pytest.approx(5.0 + STEP_S)
    assert result.worker_seconds == pytest.approx(records[0].finished_at - 1.0), "start-up is paid for"


def test_request_that_waits_again_has_the_whole_time_to_wait() -> None:
    cluster, records = make_cluster(SimClusterConfig(workers=0, kv_tokens=8192, batch_tokens=256, cost=COST))
    cluster.call_at(5.0, cluster.add_worker)
    cluster.call_at(5.5, lambda: cluster.kill_worker("worker-0"))
    cluster.call_at(12.0, cluster.add_worker)  # 6.5 s after the kill, 12 s after the request
    cluster.run([single(0)])
    assert [(record.outcome, record.worker) for record in records] == [("answered", "worker-1")]


@pytest.mark.parametrize("move", [False, True])
def test_drained_worker_leaves_when_its_requests_have_ended(move: bool) -> None:
    cluster, records = make_cluster()
    cluster.call_at(0.5, lambda: cluster.drain_worker("worker-0", move=move))
    states: list[set[str]] = []
    cluster.call_every(0.1, lambda: states.append(set(cluster.workers)))
    result = cluster.run([single(i, starts_at=0.25 * i) for i in range(6)])
    assert {record.outcome for record in records} == {"answered"}
    assert all(record.worker == "worker-1" for record in records if record.arrived_at > 0.5)
    assert "worker-0" not in cluster.dispatch.workers and states[-1] == {"worker-1"}
    if move:
        assert states[5] == {"worker-1"} and result.moved
        # Blocks are copied, so a moved stream pauses for little more than the link's latency and a step.
        assert result.inter_token_seconds.quantile(1.0) < 0.05
    else:
        assert "worker-0" in states[5] and not result.moved


def test_unknown_worker_is_named() -> None:
    with pytest.raises(NotFound, match=r"'worker-7'.*worker-0, worker-1"):
        SimCluster(CONFIG).kill_worker("worker-7")


def test_prefill_workers_hand_prompts_over() -> None:
    link = KVLink(bytes_per_second=1e6, latency_s=0.05)
    config = SimClusterConfig(
        workers=1, prefill_workers=1, kv_tokens=8192, batch_tokens=256, cost=COST, link=link, kv_bytes_per_token=1000.0
    )
    cluster, records = make_cluster(config)
    result = cluster.run([single(0, prompt=512), single(1, starts_at=20.0, prompt=32)])
    long, short = records
    assert (long.prefill_worker, long.worker, short.prefill_worker) == ("prefill-0", "worker-0", "")
    assert result.handoffs == 1
    # Two chunks of 256 tokens; while the second is computed, the link carries 51 tokens of 1000 bytes.
    prefill_s = 2 * 256 * COST.token
    assert long.first_token_at is not None
    assert long.first_token_at == pytest.approx(prefill_s + 0.05 + (512 - 51) * 1000 / 1e6, abs=2 * STEP_S)
    assert long.finished_at - long.first_token_at == pytest.approx(100 * STEP_S, rel=0.02)


@pytest.mark.parametrize("detail", ["steps", "runs"])
def test_prompts_that_a_full_step_divides_are_announced_before_they_end(
    detail: SimDetail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have 256 tokens: the first prompt has one, the others share the next, which ends in the third one."""
    config = replace(CONFIG, workers=1, prefill_workers=1, detail=detail)
    cluster = SimCluster(config, router=RouterConfig(split_tokens=100))
    is_early: dict[str, bool] = {}
    describe_copy = cluster.describe_copy

    def record(worker_name: str, request: SimRequest, output: JobOutput) -> KVSource:
        source = describe_copy(worker_name, request, output)
        is_early[request.id] = source.ready_at is not None
        return source

    monkeypatch.setattr(cluster, "describe_copy", record)
    cluster.run([single(number, prompt=150, output=2) for number in range(3)])
    assert is_early == {"request-0": False, "request-1": False, "request-2": True}


def test_killed_prefill_worker_leaves_the_prompt_to_the_answering_worker() -> None:
    config = SimClusterConfig(workers=1, prefill_workers=1, kv_tokens=8192, batch_tokens=64, cost=COST)
    cluster, records = make_cluster(config)
    cluster.call_at(0.02, lambda: cluster.kill_worker("prefill-0"))
    cluster.run([single(0, prompt=512)])
    [record] = records
    assert (record.outcome, record.prefill_worker, record.output_tokens) == ("answered", "", 101)


def test_overlap_of_copy_and_computation_is_bounded_by_both() -> None:
    link = KVLink(bytes_per_second=1e6)
    overlapped = [count_overlapped_tokens(1000, 200, 300, seconds, link, 1000.0) for seconds in (0.1, 10.0)]
    assert overlapped == [100, 800], "by the link; by the last chunk of 200 tokens"
