"""The planner's search: formulas find few workers, the simulator verifies them, and impossible tasks are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from emberline.core.errors import InvalidRequest
from emberline.core.slo import LatencyTargets
from emberline.planner import search
from emberline.planner.capacity import estimate_colocated, find_fewest_workers, p90_wait
from emberline.planner.gpu_speeds import find_gpu_speed
from emberline.planner.kv_handoff import HandoffLink
from emberline.planner.search import find_candidates, shortlist
from emberline.planner.topology import PlanningTask, Topology, list_topologies
from emberline.planner.traffic import Traffic
from emberline.planner.verification import OVERLOAD, choose_simulated_counts, simulate_topology
from emberline.planner.worker_kind import WorkerKind, WorkerOptions, list_worker_kinds

CONFIG = json.loads((Path(__file__).parents[2] / "benchmarks" / "configs" / "llama-3.1-8b.json").read_text())


@pytest.fixture(scope="module")
def kinds() -> list[WorkerKind]:
    found, _ = list_worker_kinds(CONFIG, find_gpu_speed("h200"), WorkerOptions(max_gpus=1))
    return [kind for kind in found if kind.name in ("plain", "fp8")]


def make_task(
    traffic: str = "rate=6,in=2000,out=20",
    slo: str = "ttft_p90=300ms,itl_p90=30ms",
    max_gpus: int | None = None,
    link: str = "cuda",
) -> PlanningTask:
    return PlanningTask(Traffic.parse(traffic, 0), LatencyTargets.parse(slo), HandoffLink.parse(link), max_gpus)


def test_more_traffic_needs_more_workers(kinds: list[WorkerKind]) -> None:
    gpus = [list_topologies(kinds, make_task(f"rate={rate},in=2000,out=100"))[0].gpus for rate in (5, 20, 80, 320)]
    assert gpus == sorted(gpus) and gpus[0] == 1 and 3 < gpus[3] / gpus[2] < 5


def test_shared_prefixes_need_fewer_workers(kinds: list[WorkerKind]) -> None:
    alone, shared = (
        list_topologies(kinds, make_task(f"rate=80,in=4000,out=50{prefix}")) for prefix in ("", ",prefix=0.8")
    )
    assert shared[0].gpus < alone[0].gpus


def test_pools_of_a_split_topology_have_compatible_weights(kinds: list[WorkerKind]) -> None:
    split = [topology for topology in list_topologies(kinds, make_task()) if topology.is_split]
    assert {tuple(pool.kind.weights for pool in topology.pools) for topology in split} == {
        ("plain", "plain"),
        ("fp8", "fp8"),
    }
    assert {pool.role for pool in split[0].pools} == {"prefill", "decode"}


def test_slow_links_make_the_first_token_late(kinds: list[WorkerKind]) -> None:
    def first_split(rate: float, link: str) -> Topology:
        task = make_task(f"rate={rate},in=2000,out=20", "ttft_p90=5s,itl_p90=30ms", link=link)
        return next(each for each in list_topologies(kinds, task) if each.is_split)

    fast, slow = first_split(0.1, "100"), first_split(0.1, "0.5")
    difference = 2000 * 131072 / 0.5e9 - 2000 * 131072 / 100e9
    assert slow.estimate.ttft_p90 - fast.estimate.ttft_p90 == pytest.approx(difference)
    # A decode worker can copy 0.5 GB/s, less than two prompts per second.
    assert first_split(20, "100").worker_counts[1] == 1 and first_split(20, "0.5").worker_counts[1] > 10


def test_overload_is_unstable(kinds: list[WorkerKind]) -> None:
    task = make_task("rate=100,in=4000,out=10")
    assert not estimate_colocated(kinds[0], 1, task.traffic, task.slo.itl_p90).is_stable
    assert estimate_colocated(kinds[0], 20, task.traffic, task.slo.itl_p90).is_stable


@pytest.mark.parametrize("least", [1, 2, 3, 7, 8, 100])
def test_fewest_workers(least: int) -> None:
    assert find_fewest_workers(lambda count: count >= least, 100) == least
    assert find_fewest_workers(lambda count: False, 100) is None


def test_waiting_grows_with_load_and_shrinks_with_servers() -> None:
    assert p90_wait(0.05, 1, 1.0, 0.0) == 0.0
    assert 0 < p90_wait(0.5, 1, 1.0, 0.0) < p90_wait(0.9, 1, 1.0, 0.0) < p90_wait(0.9, 1, 1.0, 2.0)
    assert p90_wait(0.9, 8, 1.0, 0.0) < p90_wait(0.9, 2, 1.0, 0.0)
    # The queue of an M/M/1 system: P(wait > t) = load * exp(-(1 - load) t).
    assert p90_wait(0.9, 1, 1.0, 1.0) == pytest.approx(21.97, rel=0.01)


def test_large_topologies_are_simulated_in_proportion() -> None:
    assert choose_simulated_counts([2, 3], 8) == [2, 3]
    assert choose_simulated_counts([100, 300], 8) == [2, 6]
    assert choose_simulated_counts([3, 1], 2) == [3, 1]  # a part would overload one of the pools
    assert choose_simulated_counts([1, 40], 8) == [1, 40]  # an engine more or less would change the load by 2.5 %
    assert choose_simulated_counts([40, 1], 8) == [40, 1]
    assert choose_simulated_counts([2, 80], 16) == [1, 40]
    assert choose_simulated_counts([9], 4) == [4]


@pytest.mark.parametrize("engines", [[1, 3], [3, 100], [7, 11], [37, 61], [1, 99]])
def test_engines_have_the_load_of_the_whole_topology(engines: list[int]) -> None:
    shares = [n / count for n, count in zip(choose_simulated_counts(engines, 8), engines, strict=True)]
    assert max(shares) <= 1.02 * min(shares)


def test_many_decode_workers_for_one_prefill_worker_are_not_overloaded(kinds: list[WorkerKind]) -> None:
    """The inter-token time of 20 decode workers is that of one of them with its part of the traffic."""
    task = make_task("rate=60,in=64,out=1000", "ttft_p90=300ms,itl_p90=6ms")
    split = next(each for each in list_topologies(kinds[:1], task) if each.is_split).with_counts([1, 20], task)
    one = split.with_counts([1, 1], alone := replace(task, traffic=task.traffic.with_rate_factor(1 / 20)))
    whole, part = simulate_topology(split, task, 0), simulate_topology(one, alone, 0)
    assert whole.engines == 21 and whole.traffic_share == 1.0
    assert whole.itl_p50 == pytest.approx(part.itl_p50, rel=0.05)
    assert whole.itl_p90 == pytest.approx(split.estimate.itl_p90, rel=0.05)  # it starts in the steady state


def test_prompts_that_are_computed_at_the_end_are_not_late(kinds: list[WorkerKind]) -> None:
    task = make_task("rate=40,in=20000,out=5", "ttft_p90=3s,itl_p90=50ms")
    split = next(each for each in list_topologies(kinds[:1], task) if each.is_split)
    load = simulate_topology(split, task, 0)
    assert load.ttft_p90 < 1.0 and not load.unanswered
    assert simulate_topology(split, make_task("rate=40,in=20000,out=5", "ttft_p90=100ms,itl_p90=50ms"), 0).unanswered


def test_pools_of_very_different_sizes_are_not_planned(kinds: list[WorkerKind]) -> None:
    task = make_task("rate=60,in=16,out=4000", "ttft_p90=300ms,itl_p90=4ms")
    assert all(max(each.worker_counts) <= 100 * min(each.worker_counts) for each in list_topologies(kinds[:1], task))


def test_simulation_agrees_with_the_formulas_at_low_load(kinds: list[WorkerKind]) -> None:
    task = make_task("rate=2,in=2048,out=10")
    for topology in shortlist(list_topologies(kinds[:1], task)):
        load = simulate_topology(topology, task, 0)
        assert load.ttft_p50 == pytest.approx(0.046303 + 0.0039, rel=0.2)  # h200-engine.json: a prompt, and a step
        assert load.itl_p50 == pytest.approx(0.0039, rel=0.05) and not load.unanswered
        assert simulate_topology(topology, task, 0) == load  # the seed determines all of it


def test_candidates_meet_the_targets_with_as_few_workers_as_possible(kinds: list[WorkerKind]) -> None:
    task = make_task("rate=100,in=500,out=10", "ttft_p90=100ms,itl_p90=30ms")
    best = find_candidates(kinds[:1], task, 0)[0]
    assert best.meets_targets and best.load.meets(task)
    tight = replace(task, max_gpus=best.topology.gpus)
    assert {each.topology.gpus for each in find_candidates(kinds[:1], tight, 0)} == {best.topology.gpus}
    fewer = best.topology.with_counts([best.topology.worker_counts[0] - 1], task)
    assert not simulate_topology(fewer, task, 0).meets(task)


@pytest.mark.parametrize(
    ("slo", "named", "reached"),
    [
        ("ttft_p90=10ms,itl_p90=30ms", "ttft_p90=10ms", "ttft_p90 above 2"),
        ("ttft_p90=1s,itl_p90=1ms", "itl_p90=1ms", "itl_p90 above 2.4"),
    ],
)
def test_impossible_targets_name_the_best_that_can_be_reached(
    kinds: list[WorkerKind], slo: str, named: str, reached: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        find_candidates(kinds, make_task(slo=slo), 0)
    assert named in raised.value.message and "any number of GPUs" in raised.value.message
    assert reached in (raised.value.hint or "") and raised.value.param == "slo"


def test_too_small_budgets_name_the_number_of_gpus(kinds: list[WorkerKind]) -> None:
    task = make_task("rate=100,in=4000,out=5", max_gpus=2)
    with pytest.raises(InvalidRequest) as raised:
        find_candidates(kinds, task, 0)
    assert raised.value.param == "max_gpus" and "max_gpus is 2" in raised.value.message
    hint = raised.value.hint or ""
    assert "--max-gpus" in hint
    rate = float(hint.split("about ")[1].split()[0])
    assert 10 < rate < 100
    affordable = replace(task, traffic=task.traffic.with_rate_factor(0.9 * rate / 100))
    assert list_topologies(kinds, affordable)[0].gpus <= 2


# -- traces ------------------------------------------------------------------------------------------------------------


def write_trace(path: Path, rows: list[tuple[float, int, int]]) -> Path:
    lines = [f"{time},ChatGPT,{prompt},{output}" for time, prompt, output in rows]
    path.write_text("\n".join(["Timestamp,Model,Request tokens,Response tokens", *lines]))
    return path


def test_busiest_part_of_a_trace_is_planned(tmp_path: Path) -> None:
    quiet = [(float(second), 100, 10) for second in range(600)]
    busy = [(600 + number / 4, 400, 20) for number in range(400)]
    traffic = Traffic.parse(str(write_trace(tmp_path / "trace.csv", quiet + busy)), 0)
    assert traffic.rate == pytest.approx(4.0, rel=0.05) and traffic.mean_prompt == 400
    assert len(traffic.replayed) >= 100 and "of 1000 requests" in traffic.description


def test_a_short_burst_at_the_end_of_a_trace_is_no_busy_minute(tmp_path: Path) -> None:
    rows = [(float(second), 100, 10) for second in range(600)] + [(600 + n / 1000, 100, 10) for n in range(100)]
    traffic = Traffic.parse(str(write_trace(tmp_path / "trace.csv", rows)), 0)
    assert traffic.rate == pytest.approx(160 / 60, rel=0.05)
    short = Traffic.parse(str(write_trace(tmp_path / "trace.csv", rows[600:])), 0)
    assert len(short.replayed) == 100  # a trace of less than a minute is planned for as a whole


def test_shared_prefixes_of_a_trace_are_counted(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 5, "hash_ids": [0, n + 1]} for n in range(50)
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert Traffic.parse(str(path), 0).prefix_share == pytest.approx(49 / 100)


def test_traces_are_replayed_at_the_rate(kinds: list[WorkerKind], tmp_path: Path) -> None:
    bursts = [(float(number // 10 * 5), 500, 5) for number in range(200)]  # 10 at once, every 5 s
    trace = str(write_trace(tmp_path / "trace.csv", bursts))
    task = make_task(trace, "ttft_p90=1s,itl_p90=30ms")
    topology = list_topologies(kinds[:1], task)[0]
    even = replace(task, traffic=replace(task.traffic, replayed=()))
    burst_load, even_load = (simulate_topology(topology, each, 0) for each in (task, even))
    assert burst_load.ttft_p90 > 3 * even_load.ttft_p90 and not burst_load.cached_share


@pytest.mark.parametrize(
    ("rows", "named"), [([], "no request"), ([(1.0, 10, 10)], "no two"), ([(1.0, 10, 10)] * 3, "no two")]
)
def test_traces_without_a_rate_are_refused(tmp_path: Path, rows: list[tuple[float, int, int]], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Traffic.parse(str(write_trace(tmp_path / "trace.csv", rows)), 0)


@pytest.mark.parametrize("max_gpus", [None, 100])
def test_targets_that_only_the_simulation_misses_name_the_closest_candidate(
    kinds: list[WorkerKind], monkeypatch: pytest.MonkeyPatch, max_gpus: int | None
) -> None:
    late = replace(OVERLOAD, ttft_p90=0.9, itl_p90=0.02)
    monkeypatch.setattr(search, "simulate_topology", lambda *arguments: late)
    with pytest.raises(InvalidRequest, match=r"reaches ttft_p90=900ms and itl_p90=20\.0ms") as raised:
        find_candidates(kinds, make_task(max_gpus=max_gpus), 0)
    assert raised.value.param == "slo"


def test_replies_of_one_token_have_no_time_between_tokens(kinds: list[WorkerKind]) -> None:
    best = find_candidates(kinds[:1], make_task("rate=4,in=300,out=1", max_gpus=1), 0)[0]
    assert best.meets_targets and best.load.itl_p90 == 0.0 and best.load.requests >= 100
