"""FastWorker gives the times of the engine's scheduler and KV manager, step by step, without planning each step."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from emberline.cli.__main__ import main
from emberline.core.errors import InvalidRequest
from emberline.sim.cluster import SimCluster, SimClusterConfig, SimDetail
from emberline.sim.costmodel import CostModel
from emberline.sim.fast_run import FastRun
from emberline.sim.prefix_cache import SimPrefixCache
from emberline.sim.prompt import PromptSegment, SimPromptBuilder, SimRequest
from emberline.sim.result import RequestRecord, SimResult
from emberline.sim.workloads.agents import AgentWorkload
from emberline.sim.workloads.arrivals import ConstantRate
from emberline.sim.workloads.requests import RequestWorkload, Workload

ONE = SimClusterConfig(workers=1, kv_tokens=32_768, max_running=32, batch_tokens=512)
RANDOM = RequestWorkload(ConstantRate(4.0), 8.0, 700.0, 60.0, 0.7, shared_tokens=300, shared_prompts=2)
AGENTS = AgentWorkload(
    num_sessions=8, systems=2, system_tokens=(500, 900), turns=(2, 4), reply_tokens=60, think_seconds=2, over_seconds=15
)


def simulate(config: SimClusterConfig, workload: Workload, detail: SimDetail) -> tuple[SimResult, list[RequestRecord]]:
    cluster, records = SimCluster(replace(config, detail=detail)), list[RequestRecord]()
    cluster.observers.append(records.append)
    return cluster.run(workload.sessions(2)), records


@pytest.mark.parametrize(
    ("config", "workload"),
    [
        (ONE, RANDOM),
        (replace(ONE, cost=CostModel(plans_ahead=True)), RANDOM),
        (replace(ONE, prefill_workers=1), RANDOM),
        (replace(ONE, kv_tokens=8192), AGENTS),
    ],
    ids=["random", "planned ahead", "split", "agents"],
)
def test_runs_of_steps_take_the_time_of_single_steps(config: SimClusterConfig, workload: Workload) -> None:
    (steps, each), (runs, fast) = (simulate(config, workload, detail) for detail in ("steps", "runs"))
    assert runs.requests == steps.requests and runs.output_tokens == steps.output_tokens
    assert runs.inter_token_seconds.count == steps.inter_token_seconds.count
    assert runs.handoffs == steps.handoffs
    assert runs.cached_share == pytest.approx(steps.cached_share, abs=0.01)
    assert runs.busy_seconds == pytest.approx(steps.busy_seconds, rel=0.01)
    for ours, theirs in (
        (runs.ttft_seconds, steps.ttft_seconds),
        (runs.inter_token_seconds, steps.inter_token_seconds),
    ):
        assert ours.mean == pytest.approx(theirs.mean, rel=0.03)
        assert ours.quantile(0.9) == pytest.approx(theirs.quantile(0.9), rel=0.05)
    by_arrival = {record.arrived_at: record for record in each}
    if workload is RANDOM:  # an agent's next turn begins when the last has ended
        late = [abs(record.finished_at - by_arrival[record.arrived_at].finished_at) for record in fast]
        assert max(late) < 0.02, "less than two steps with a whole prompt chunk"


def test_full_cache_preempts_in_runs_as_in_steps() -> None:
    config = replace(ONE, kv_tokens=2048, max_running=16)
    workload = RequestWorkload(ConstantRate(10.0), 1.0, 200.0, 250.0, 0.3)
    (steps, _), (runs, records) = (simulate(config, workload, detail) for detail in ("steps", "runs"))
    assert {record.outcome for record in records} == {"answered"}
    assert runs.output_tokens == steps.output_tokens
    assert runs.seconds == pytest.approx(steps.seconds, rel=0.1)


def test_moved_streams_keep_their_tokens_in_runs() -> None:
    cluster, records = SimCluster(replace(ONE, workers=2, detail="runs")), list[RequestRecord]()
    cluster.observers.append(records.append)
    cluster.call_at(2.0, lambda: cluster.kill_worker("worker-0"))
    cluster.call_at(3.0, lambda: cluster.add_worker())
    cluster.call_at(5.0, lambda: cluster.drain_worker("worker-1", move=True))
    result = cluster.run(RANDOM.sessions(1))
    assert {record.outcome for record in records} == {"answered"} and result.moved
    assert result.output_tokens == sum(record.output_tokens for record in records)
    assert result.inter_token_seconds.count == result.output_tokens - len(records), "one time between any two tokens"


@pytest.mark.parametrize("detail", ["steps", "runs"])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once_while_workers_come_and_go(seed: int, detail: SimDetail) -> None:
    rng = random.Random(seed)
    config = SimClusterConfig(
        workers=2,
        prefill_workers=seed % 2,
        kv_tokens=rng.choice([4096, 16_384]),
        max_running=rng.choice([4, 32]),
        batch_tokens=rng.choice([128, 512]),
        cost=CostModel(plans_ahead=rng.random() < 0.5),
        detail=detail,
    )
    cluster, records = SimCluster(config), list[RequestRecord]()
    cluster.observers.append(records.append)

    def change_workers() -> None:
        names = [name for name, worker in cluster.workers.items() if worker.state == "ready"]
        action = rng.choice(["kill", "drain", "add"]) if len(names) > 1 else "add"
        if action == "kill":
            cluster.kill_worker(rng.choice(names))
        elif action == "drain":
            cluster.drain_worker(rng.choice(names), move=rng.random() < 0.5)
        else:
            cluster.add_worker(start_seconds=rng.uniform(0.0, 1.0))

    cluster.call_every(0.4, change_workers)
    workload = RequestWorkload(ConstantRate(12.0), 3.0, rng.uniform(50, 600), rng.uniform(5, 60), 0.8, 200, 3)
    result = cluster.run(workload.sessions(seed))  # checks the invariants of the workers
    assert len(records) == len(list(workload.sessions(seed)))
    assert result.inter_token_seconds.count == sum(max(0, record.output_tokens - 1) for record in records)
    answered = [record for record in records if record.outcome == "answered"]
    assert result.ttft_seconds.count == sum(record.first_token_at is not None for record in records)
    assert result.requests == len(answered) > len(records) / 2


def test_steps_until_a_time_are_exact() -> None:
    run = FastRun(0.0, first_s=0.01, growth_s=1e-5)
    for steps in (1, 2, 57, 4000):
        exact = sum(0.01 + 1e-5 * i for i in range(steps))
        assert run.seconds(steps) == pytest.approx(exact)
        assert run.steps_until(exact - 1e-7) == steps
        assert run.steps_until(exact + 1e-7) == steps + 1
    assert FastRun(0.0, first_s=0.01).steps_until(-1.0) == 1


def test_prefix_cache_evicts_the_end_of_the_least_recently_used_prompt() -> None:
    cache = SimPrefixCache(100, block_size=10)
    old, new = _request("system", "old"), _request("system", "new")
    for time, request in enumerate((old, new)):
        held, cached = cache.hold_prefix(request)
        assert cached == (30 if request is new else 0)
        assert cache.allocate(60 - cached)
        held, shared = cache.add_prompt(request, held, 60, float(time))
        assert shared == 60 - cached
        cache.release(held, float(time))
    assert cache.num_used == 90 and cache.allocate(30)
    assert [cache.hold_prefix(request)[1] for request in (old, new)] == [40, 60], "20 tokens of the old prompt's end"
    assert not cache.make_room(1), "everything is held"


def test_what_runs_cannot_simulate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="KV events cannot be simulated with detail=runs"):
        SimCluster(replace(ONE, detail="runs"), kv_events=True)


def test_simulate_prints_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,300,5\n2024-05-10 00:00:01,400,6\n")
    assert main(["simulate", str(trace), "--workers", "2", "--kill", "0.5", "--start-seconds", "0.1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 2 and report["output_tokens_per_second"] == pytest.approx(11 / report["seconds"])
    assert report["worker_hours"] == pytest.approx(2 * report["seconds"] / 3600)
    assert report["step_costs"] == "h200 llama-8b plain"
    assert main(["simulate", str(trace), "--detail", "runs", "--routing", "random"]) == 0
    assert "worker_hours" in capsys.readouterr().out
    assert main(["simulate", str(trace), "--detail", "runs", "--itl-target-ms", "20"]) == 1
    assert "itl_target_ms cannot be simulated with detail=runs" in capsys.readouterr().err
    assert main(["simulate", str(trace), "--kv-tokens", "0"]) == 1
    assert "--kv-tokens is 0; it must be above 0" in capsys.readouterr().err
    assert main(["simulate", str(trace), "--until", "nan"]) == 1
    assert "--until is nan; it must be at least 0" in capsys.readouterr().err
    for times in ("nan", "1,-4", "inf", "soon"):
        with pytest.raises(SystemExit):
            main(["simulate", str(trace), f"--kill={times}"])
        assert "is not a list of seconds" in capsys.readouterr().err


def _request(*keys: str) -> SimRequest:
    prompt = SimPromptBuilder()
    for key in keys:
        prompt.add(PromptSegment(key, 30))
    return prompt.build_request(keys[-1], PromptSegment("reply", 5))
