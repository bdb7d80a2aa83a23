"""The simulator's latencies: against recorded runs of an H200, and the parts of the benches that compare them."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberline.bench import accuracy_h200, accuracy_sim, sim_accuracy, split_claim
from emberline.bench.accuracy_load import LoadResult, LoadShape, TimedRequest, measure_load
from emberline.bench.accuracy_sim import TRIED_CHUNK_S, HostOverheads, SimulatedCluster
from emberline.bench.client import RequestTrace
from emberline.bench.report import BenchReport
from emberline.bench.workload import LogNormal
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.step_costs import StepCostTable
from emberline.sim.costs import find_cost_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TABLE = StepCostTable("steps of 0.1 s", "test", ((1, 0.1), (1000, 0.1)), 0.0, 0.0)
CLUSTER = SimulatedCluster(
    TABLE, workers=1, prefill_workers=0, split_tokens=8, max_running=4, batch_tokens=64, kv_tokens=4096
)


def test_simulated_open_loop_is_near_the_run_on_an_h200() -> None:
    """Inter-token times within 10 % for the first 6 s of the arrivals, which take a second to simulate."""
    real = json.loads((RESULTS / "h200-open.json").read_text())
    run = accuracy_h200.simulate_open_loop(real["config"]["parts"]["open"]["settings"], 6.0)
    simulated = LoadResult.from_times(run.due, run.times)
    assert simulated.itl_p90 == pytest.approx(real["results"]["open8_itl_p90_ms"]["value"] / 1e3, rel=0.1)


def test_host_overheads_are_added_to_steps_requests_and_handoffs() -> None:
    requests = [TimedRequest(0.0, [1] * 32, 3), TimedRequest(10.0, [1] * 32, 3)]
    plain = CLUSTER.simulate(requests, HostOverheads())
    assert plain.ttft_p90 == pytest.approx(0.1, rel=0.01)
    assert plain.itl_p50 == pytest.approx(0.1, rel=0.01)
    assert plain.output_rate == pytest.approx(6 / 10.3, rel=0.01)
    slow = CLUSTER.simulate(requests, HostOverheads(step_s=0.05, request_s=0.2))
    assert slow.ttft_p90 == pytest.approx(0.35, rel=0.01)
    assert slow.itl_p90 == pytest.approx(0.15, rel=0.01)
    split = replace(CLUSTER, prefill_workers=1)
    assert split.simulate(requests, HostOverheads(handoff_s=0.3), requests).ttft_p90 == pytest.approx(0.4, rel=0.01)
    overheads = HostOverheads(handoff_s=0.3, prefill_chunk_s=0.05)
    assert split.simulate(requests, overheads, requests).ttft_p90 == pytest.approx(0.45, rel=0.01)


def test_host_time_for_each_prompt_is_fitted_to_the_mean_time_between_tokens() -> None:
    requests = [TimedRequest(0.0, [1] * 32, 8), *(TimedRequest(0.15 + 0.2 * i, [1] * 32, 1) for i in range(3))]
    real = CLUSTER.simulate(requests, HostOverheads(chunk_s=0.01)).itl_mean
    assert real == pytest.approx((7 * 0.1 + 3 * 0.01) / 7, rel=0.01)  # the first request decodes beside three prompts
    assert CLUSTER.fit_chunk_overhead(requests, HostOverheads(), [], real) == pytest.approx(0.01, rel=0.01)
    assert CLUSTER.fit_chunk_overhead(requests, HostOverheads(), [], real / 2) == 0.0
    assert CLUSTER.fit_chunk_overhead(requests, HostOverheads(), [], 2 * real) == max(TRIED_CHUNK_S)


def test_host_time_for_prompts_of_prefill_workers_is_fitted_to_first_tokens() -> None:
    split, requests = replace(CLUSTER, prefill_workers=1), [TimedRequest(10.0 * i, [1] * 32, 2) for i in range(3)]
    real = split.simulate(requests, HostOverheads(prefill_chunk_s=0.01), requests).ttft_mean
    assert real > split.simulate(requests, HostOverheads(chunk_s=0.01), requests).ttft_mean
    assert split.fit_prefill_overhead(requests, HostOverheads(), requests, real) == pytest.approx(0.01, rel=0.05)


def test_fit_follows_queues_that_grow_faster_than_the_time_for_a_prompt() -> None:
    means = [1.0 + 10 * s + 4000 * s * s for s in TRIED_CHUNK_S]
    assert accuracy_sim._fit_to_curve(means, 1.0 + 0.03 + 4000 * 0.003**2) == pytest.approx(0.003, abs=2e-5)
    with pytest.raises(EmberlineError, match="do not grow"):
        accuracy_sim._fit_to_curve(means[::-1], 1.0)


def test_simulated_quantiles_are_those_of_numpy() -> None:
    values, found = [0.1, 0.2, 0.2, 0.2, 1.7], accuracy_sim.ExactDistribution()
    for value, count in ((0.1, 1), (0.2, 3), (1.7, 1)):
        found.add(value, count)
    assert [found.quantile(each) for each in (0.5, 0.9)] == np.quantile(values, (0.5, 0.9)).tolist()
    assert found.mean == pytest.approx(sum(values) / 5) and math.isnan(accuracy_sim.ExactDistribution().quantile(0.5))


@pytest.mark.parametrize(("prompt", "shortest", "longest"), [(32, 0.2, 0.3), (96, 0.2, 0.3)])
def test_blocks_of_several_chunks_are_copied_while_the_answering_worker_computes(
    prompt: int, shortest: float, longest: float
) -> None:
    """A prompt of one chunk is announced when it is computed, and its copy starts with the next step.

    So a prompt of two chunks of 0.1 s has its first token at the same time."""
    requests = [TimedRequest(0.0, [1] * 32, 30), TimedRequest(0.35, [1] * prompt, 2)]
    warm_up = [TimedRequest(0.0, [1] * 32, 2)]
    split = replace(CLUSTER, prefill_workers=1).simulate(requests, HostOverheads(handoff_s=0.01), warm_up)
    assert shortest < split.ttft_p90 < longest


def test_capacity_is_what_the_slots_serve() -> None:
    shape = LoadShape(LogNormal(0.0, 0.0, 8), LogNormal(0.0, 0.0, 8), 100)  # prompts and outputs of 8 tokens
    assert CLUSTER.capacity(shape, HostOverheads()) == pytest.approx(4 / 0.8, rel=0.05)


class FakeClient:
    """Replies to requests at once, with an event for each token."""

    def __init__(self, error: str | None = None) -> None:
        self._error = error

    async def complete(self, prompt: list[int], max_tokens: int) -> RequestTrace:
        now = asyncio.get_running_loop().time()
        return RequestTrace(now, [now + 0.01 * i for i in range(max_tokens)], now, len(prompt), max_tokens, self._error)


def test_failed_requests_are_no_measurement() -> None:
    requests = LoadShape(LogNormal(0.0, 0.0, 8), LogNormal(0.0, 0.0, 8), 100).draw_poisson(1000.0, 0.01, seed=1)
    client: Any = FakeClient()
    assert asyncio.run(measure_load(client, requests)).itl_p90 == pytest.approx(0.01)
    failing: Any = FakeClient("429")
    with pytest.raises(EmberlineError, match="429"):
        asyncio.run(measure_load(failing, requests))


def test_largest_errors_are_reported() -> None:
    real = LoadResult(1.0, 2.0, 0.1, 0.2, 100.0)
    near, far = replace(real, ttft_p90=2.1), replace(real, itl_p90=0.15, output_rate=98.0)
    points = [sim_accuracy.AccuracyPoint(n, 1.0, 9, real, s) for n, s in (("near", near), ("far", far))]
    report = BenchReport("sim-accuracy", {"points": {}})
    sim_accuracy.add_points(report, points)
    assert report.results["ttft_p90_error_max"].value == pytest.approx(0.05)
    assert report.results["itl_p90_error_max"].value == pytest.approx(0.25)
    assert report.results["throughput_error_max"].value == pytest.approx(0.02)
    sim_accuracy.add_points(report, [replace(points[0], real=replace(real, output_rate=math.nan))], prefix="h200_")
    assert "h200_throughput_error_max" not in report.results
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parametrize(("cases", "loads", "param"), [(["huge"], [40], "cases"), (["tiny"], [0], "loads")])
def test_unknown_cases_and_loads_are_refused(cases: list[str], loads: list[int], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sim_accuracy.bench(cases, loads, 1.0, RESULTS, Path("unused"))
    assert refused.value.param == param


def test_recording_of_another_bench_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"bench": "router"}')
    with pytest.raises(InvalidRequest, match="no measurements of this bench"):
        sim_accuracy.compare_recorded(file, RESULTS)


def test_recorded_points_are_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = json.loads((RESULTS / "sim-accuracy.json").read_text())
    recorded["config"] |= {"cases": ["smollm2"], "loads": [40]}
    file = tmp_path / "real.json"
    file.write_text(json.dumps(recorded))
    monkeypatch.setattr(accuracy_h200, "FILES", ())  # these are compared above
    monkeypatch.setattr(accuracy_sim, "TRIED_CHUNK_S", (0.0, 4e-3, 12e-3))  # fewer simulations for the fit
    report = sim_accuracy.compare_recorded(file, RESULTS)
    before = recorded["config"]["points"]["smollm2_colocated_40"]
    assert report.config["points"]["smollm2_colocated_40"]["real"] == before["real"]
    assert report.results["throughput_error_max"].value < 0.05
    assert report.config["measured"]["commit"] == recorded["commit"]


def test_split_arrangement_shortens_inter_token_times() -> None:
    table = find_cost_table("h200", "llama-8b")
    handoff = json.loads((RESULTS / "h200-handoff.json").read_text())["results"]
    assert split_claim.LINK.bytes_per_second == 1e9 * handoff["handoff_cuda"]["value"]
    assert split_claim.LINK.latency_s == pytest.approx(handoff["handoff_cuda_overhead_ms"]["value"] / 1e3)
    colocated = split_claim.simulate(split_claim.GPUArrangement(2), table, 14.0, 3.0)
    split = split_claim.simulate(split_claim.GPUArrangement(1, 2), table, 14.0, 3.0)
    assert colocated.itl_p90 > 0.09 > 0.03 > split.itl_p90
    assert not split_claim.can_keep_up(split_claim.GPUArrangement(1, 1), table, 14.0)
    for rate, seconds in ((1.0, 9.0), (64.0, 0.0)):
        with pytest.raises(InvalidRequest):
            split_claim.bench(rate, seconds)


@pytest.mark.parametrize(
    ("foreign", "kept", "attempts"),
    [([0.0, 0.01], 1, 1), ([0.0, 0.4, 0.4, 0.44], 2, 2), ([0.0, 0.3, 0.3, 0.5, 0.5, 0.9], 2, 3)],
)
def test_disturbed_measurements_are_repeated(
    monkeypatch: pytest.MonkeyPatch, foreign: list[float], kept: int, attempts: int
) -> None:
    """`foreign`: foreign seconds before and after each attempt of a second. `kept`: the attempt with the fewest."""
    results = [LoadResult(float(i), 0.0, 0.0, 0.0, 0.0) for i in range(1, 4)]
    taken, foreign_seconds, clock = iter(results), iter(foreign), iter(range(10))

    prompts = []

    async def measure(client: Any, requests: list[TimedRequest]) -> LoadResult:
        prompts.append(tuple(requests[0].prompt))
        return next(taken)

    monkeypatch.setattr(sim_accuracy, "measure_load", measure)
    monkeypatch.setattr(sim_accuracy, "total_foreign_seconds", lambda: next(foreign_seconds))
    monkeypatch.setattr(sim_accuracy.time, "perf_counter", lambda: float(next(clock)))
    shape = sim_accuracy.SHAPES["tiny"]
    requests = shape.draw_requests([0.0], seed=0)
    real, _ = asyncio.run(sim_accuracy._measure_undisturbed(None, shape, requests, iter((1, 2))))  # type: ignore[arg-type]
    assert real is results[kept - 1] and len(list(taken)) == 3 - attempts
    assert len(set(prompts)) == attempts  # otherwise a prefix cache would have them
    assert len({len(prompt) for prompt in prompts}) == 1
