"""Cost tables: steps are interpolated between measured ones, and the H200's tables are those of the result files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emberline.bench.cost_tables import build_h200_tables
from emberline.core.clock import ManualClock
from emberline.core.engine_config import EngineConfig, SchedulerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.plan import StepPlan, WorkItem
from emberline.core.request import Submission
from emberline.core.step_costs import MeasuredStep, StepCostData, StepCostTable, count_prompt_pairs
from emberline.engine.engine import Engine
from emberline.engine.paced_executor import PacedExecutor, pace_executor
from emberline.sim.costs import find_cost_table, list_cost_tables
from emberline.sim.runners import make_sim_runner

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DATA = StepCostData(
    "cpu",
    "tiny",
    "plain",
    ["here"],
    [MeasuredStep(1.1, rows=1, context=100), MeasuredStep(2.0, rows=11), MeasuredStep(12.0, prompt=111)],
    context_seconds=0.001,
    pair_seconds=0.0,
)
TABLE = StepCostTable.from_data(DATA)


def test_steps_between_measured_sizes_are_interpolated() -> None:
    assert TABLE.token_points == ((1, pytest.approx(1.0)), (11, 2.0), (111, 12.0))
    assert TABLE.step_seconds(1, 100) == pytest.approx(1.1), "as measured"
    assert TABLE.step_seconds(6, 0) == pytest.approx(1.5)
    assert TABLE.step_seconds(11, 0, 50) == pytest.approx(7.0), "decoding requests and a prompt share a step"
    assert TABLE.step_seconds(0, 0, 211) == pytest.approx(22.0), "the last line continues"
    assert TABLE.step_seconds(0, 0) == 0.0
    assert StepCostTable.from_data(DATA.scale(2.0)).step_seconds(6, 50) == pytest.approx(2 * TABLE.step_seconds(6, 50))


def test_plan_costs_tokens_context_and_pairs_of_prompts() -> None:
    table = replace(TABLE, pair_seconds=1e-6)
    plan = StepPlan(1, (), [_work(1, start=99), _work(50, start=20)], ())
    pairs = sum(range(21, 71))
    assert count_prompt_pairs(20, 50) == pairs
    assert table.estimate_step_seconds(plan) == pytest.approx(table.step_seconds(1, 100, 50, pairs))


def test_more_tokens_never_take_less_time() -> None:
    noisy = replace(DATA, measured=[*DATA.measured, MeasuredStep(0.5, rows=4)])
    seconds = [StepCostTable.from_data(noisy).step_seconds(rows, 0) for rows in range(1, 12)]
    assert seconds == sorted(seconds)


def test_h200_tables_are_those_of_the_result_files() -> None:
    assert list(list_cost_tables()) == build_h200_tables(RESULTS)
    table = find_cost_table("h200", "llama-8b", "plain")
    measured = json.loads((RESULTS / "h200-engine.json").read_text())["results"]
    for rows in (1, 64, 256):
        assert 1e3 * table.step_seconds(rows, 640 * rows) == pytest.approx(
            measured[f"decode_b{rows}_ms"]["value"], 1e-3
        )
    for prompt in (2048, 8192):
        ms = 1e3 * table.step_seconds(0, 0, prompt, count_prompt_pairs(0, prompt))
        assert ms == pytest.approx(measured[f"prefill_{prompt}_ms"]["value"], 1e-3)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (("h100", "llama-8b", "plain"), "gpu"),
        (("h200", "gpt-2", "plain"), "shape"),
        (("h200", "llama-8b", "q4"), "weights"),
    ],
)
def test_unknown_tables_are_refused_with_the_known_ones(asked: tuple[str, str, str], param: str) -> None:
    with pytest.raises(InvalidRequest, match=asked[("gpu", "shape", "weights").index(param)]) as refused:
        find_cost_table(*asked)
    assert refused.value.param == param and refused.value.hint


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"measured": [{"seconds": 1.0, "rows": 1}]}, "measured"),
        ({"measured": [{"seconds": 0.0, "rows": 1}, {"seconds": 1.0, "rows": 2}]}, "measured"),
        ({"measured": [{"seconds": 1.0}, {"seconds": 1.0, "rows": 2}]}, "measured"),
        ({"measured": [{"seconds": "1", "rows": 1}]}, "seconds"),
        ({"measured": 3}, "measured"),
        ({"context_seconds": -1.0}, "context_seconds"),
        ({"pair_seconds": float("inf")}, "pair_seconds"),
        ({"gpu": None}, "gpu"),
        ({"speed": 1}, "speed"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    good: dict[str, Any] = {"gpu": "cpu", "shape": "tiny", "weights": "plain", "sources": [], "pair_seconds": 0.0}
    good |= {"context_seconds": 0.0, "measured": [{"seconds": 1.0, "rows": 1}, {"seconds": 2.0, "prompt": 9}]}
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"bench": "step-costs", "config": {"table": good}}))
    assert StepCostTable.load(file).step_seconds(0, 0, 9) == 2.0
    file.write_text(json.dumps(good | change))
    with pytest.raises(InvalidRequest) as refused:
        StepCostTable.load(file)
    assert refused.value.param == param


def test_file_without_a_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("no JSON")
    for name, reason in (("absent.json", "cannot read"), ("text.json", "not valid JSON")):
        with pytest.raises(InvalidRequest, match=reason) as refused:
            StepCostTable.load(tmp_path / name)
        assert refused.value.param == "step_costs" and "emberline bench step-costs" in str(refused.value)
    for text in ('{"bench": "router", "config": {}}', '{"bench": "router", "config": "fast"}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(InvalidRequest, match="no cost table"):
            StepCostTable.load(tmp_path / "other.json")
    with pytest.raises(InvalidRequest, match="scaled"):
        DATA.scale(0.0)


@pytest.mark.parametrize(("plans_ahead", "first_token_at"), [(False, 3.0), (True, 4.0)])
def test_request_waits_one_step_more_for_an_engine_that_plans_ahead(plans_ahead: bool, first_token_at: float) -> None:
    """A request that arrives in the second step of another is computed in the third step, or in the fourth."""
    clock = ManualClock()
    costs = replace(TABLE, token_points=((1, 1.0), (2, 1.0)), context_seconds=0.0, plans_ahead=plans_ahead)
    engine = Engine(SchedulerConfig(), make_sim_runner(64, costs, clock), clock)
    engine.add(_submission("first"))
    tokens: dict[str, list[float]] = {"first": [], "second": []}
    while not engine.idle:
        if clock.time >= 2.0 and not tokens["second"] and len(engine.scheduler.requests) == 1:
            engine.add(_submission("second"))  # as a message that arrived while the engine computed
        for output in engine.step():
            tokens[output.id] += [clock.time] * len(output.tokens)
    assert tokens["first"] == [float(i) for i in range(1, 9)]
    assert tokens["second"][0] == first_token_at


class FakeExecutor:
    """Computes a step in a set time."""

    def __init__(self, clock: ManualClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.calls: list[str] = []

    def copy(self, saves: object, loads: object) -> None:
        self.calls.append("copy")

    def clear(self, blocks: object) -> None:
        self.calls.append("clear")

    def compute(self, work: object, capture: object = None) -> str:
        self._clock.advance(self._seconds)
        return "logits"


@pytest.mark.parametrize(("computing", "lasts"), [(0.25, 1.5), (4.0, 4.0)])
def test_paced_steps_take_as_long_as_in_the_table_or_longer(computing: float, lasts: float) -> None:
    clock = ManualClock()
    executor: Any = FakeExecutor(clock, computing)
    paced = PacedExecutor(executor, TABLE, clock=lambda: clock.time, sleep=clock.advance)
    paced.copy((), ())
    paced.clear(())
    assert executor.calls == ["copy", "clear"]
    assert paced.compute([_work(6, start=0)]) == "logits"
    assert clock.time == pytest.approx(lasts)


def test_only_engines_on_a_cpu_are_paced() -> None:
    with pytest.raises(InvalidRequest, match="but only an engine on the CPU"):
        EngineConfig.build("model", step_costs="table.json").with_gpu_defaults()
    executor: Any = object()
    assert pace_executor(executor, None) is executor
    with pytest.raises(InvalidRequest):
        pace_executor(executor, "absent.json")


def _submission(name: str) -> Submission:
    return Submission(name, [1], SamplingParams(max_tokens=8, ignore_eos=True, seed=0), timeout=1e9)


def _work(tokens: int, start: int) -> WorkItem:
    return WorkItem("a", start, [1] * tokens, [0], samples=True)
