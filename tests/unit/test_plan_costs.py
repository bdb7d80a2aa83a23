"""Costs of the planner: copies of result files agree with them, and projections agree with measured steps."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from emberline.core.errors import InvalidRequest
from emberline.core.step_costs import StepCostTable
from emberline.models.config_outline import read_outline
from emberline.planner import measured_figures as figures
from emberline.planner.drafted_costs import find_drafted_costs
from emberline.planner.gpu_speeds import find_gpu_speed
from emberline.planner.measured_shapes import (
    find_measured,
    find_shape_name,
    make_correction,
    project_costs,
    projection_error,
    read_measured_shapes,
)
from emberline.planner.step_costs import ProjectedCosts
from emberline.planner.worker_kind import WorkerKind, WorkerOptions, list_worker_kinds
from emberline.sim.costs import list_cost_tables

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H200 = find_gpu_speed("h200")


def read_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((BENCHMARKS / "configs" / f"{name}.json").read_text())
    return config


def read_results(file: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((BENCHMARKS / "results" / file).read_text())
    return results


@cache
def list_kinds(name: str, **options: Any) -> dict[str, WorkerKind]:
    kinds, _ = list_worker_kinds(read_config(name), H200, WorkerOptions(**options))
    return {kind.name: kind for kind in kinds}


def test_figures_are_those_of_the_result_files() -> None:
    drafts = read_results(figures.DRAFTS_FILE)
    for weights, steps in figures.DRAFTED_STEPS.items():
        assert drafts["config"][weights]["head_bytes"] == figures.DRAFT_HEAD_BYTES[weights]
        for step in steps:
            name = f"spec_{weights}_b{step.batch}"
            assert step.ms_per_token == drafts["results"][f"{name}_ms"]["value"]
            assert step.tokens_per_step == drafts["results"][f"{name}_tokens_per_step"]["value"]
    handoff = read_results(figures.HANDOFF_FILE)["results"]
    names = {"tcp": "handoff_tcp_8", "cuda": "handoff_cuda"}
    assert {link: handoff[name]["value"] for link, name in names.items()} == figures.HANDOFF_GB_S
    for (weights, ranks), milliseconds in figures.RANK_STEPS_MS.items():
        results = read_results(figures.rank_file(weights, ranks))["results"]
        assert milliseconds == {batch: results[f"decode_b{batch}_ms"]["value"] for batch in (1, 8, 64)}
    assert read_results(figures.START_FILE)["results"]["cold_ready_s"]["value"] == figures.START_S


def test_every_measured_table_has_its_shape() -> None:
    shapes = {table.shape for table in list_cost_tables() if table.gpu == "h200"}
    assert shapes | {figures.RANK_SHAPE} == read_measured_shapes().keys()


def test_shapes_are_found_by_their_sizes() -> None:
    config = read_measured_shapes()["llama-8b"]
    assert find_shape_name(read_outline({**config, "max_position_embeddings": 8192})) == "llama-8b"
    assert find_shape_name(read_outline({**config, "num_hidden_layers": 31})) == ""
    assert read_config("llama-3.1-8b") == config
    for name in ("qwen3-30b-a3b", "deepseek-v2-lite"):
        assert find_shape_name(read_outline(read_config(name))) == name


def test_projections_are_near_the_measured_steps() -> None:
    error = projection_error()
    assert error.steps > 40 and error.median < 0.05 and error.p90 < 0.15 and error.expert_prompts < 0.1


def test_prompts_with_experts_also_sort_rows_and_fill_tiles() -> None:
    work = project_costs(read_measured_shapes()["qwen3-30b-a3b"], H200, "plain").work
    # 4,096 tokens are 256 rows of each of 128 experts, and half a tile of 64 rows more.
    assert work.multiplied_weights(4096) == (work.dense_weights + work.expert_weights * 288 / 256) * 4096
    # Of a token's 8 experts in 48 layers: 4 copies of 2,048 numbers, and 2 copies of the 768 between the products.
    assert work.expert_row_bytes == 48 * 8 * 2 * (4 * 2048 + 2 * 768)
    assert project_costs(read_measured_shapes()["llama-8b"], H200, "plain").work.expert_row_bytes == 0


def test_corrected_projection_equals_the_measured_steps() -> None:
    measured = find_measured("h200", "llama-8b", "plain")
    assert measured is not None
    costs = project_costs(read_measured_shapes()["llama-8b"], H200, "plain", make_correction(measured))
    for step in measured.measured:
        pairs = step.prompt * (step.prompt + 1) / 2
        assert costs.step_seconds(step.rows, step.rows * step.context, step.prompt, pairs) == pytest.approx(
            step.seconds
        )


def test_tensor_parallel_steps_are_shorter_but_not_proportionally() -> None:
    kinds = list_kinds("llama-3.1-8b")
    times = [kinds[name].costs.step_seconds(1, 640) for name in ("plain", "plain tp2", "plain tp4", "plain tp8")]
    assert all(first / 2 < second < first for first, second in itertools.pairwise(times))
    assert kinds["plain"].basis == "measured" and kinds["plain tp2"].basis == "projected"


@pytest.mark.parametrize(("weights", "ranks"), [("plain", 2), ("packed", 4), ("fp8", 8)])
def test_steps_of_a_rank_are_the_measured_ones(weights: str, ranks: int) -> None:
    kind = list_kinds("llama-3.3-70b")[f"{weights} tp{ranks}"]
    assert isinstance(kind.costs, ProjectedCosts) and kind.basis == "projected"
    for rows, milliseconds in figures.RANK_STEPS_MS[weights, ranks].items():
        step_s = kind.costs.step_seconds(rows, rows * 640) - kind.costs.collective_seconds(rows, rows)
        assert step_s == pytest.approx(milliseconds / 1e3)


def test_pipeline_takes_as_long_as_one_gpu_and_holds_more() -> None:
    kinds = list_kinds("llama-3.1-8b")
    one, two = kinds["plain"], kinds["plain pp2"]
    assert two.costs.step_seconds(8, 8 * 640) == pytest.approx(one.costs.step_seconds(8, 8 * 640), rel=0.03)
    assert two.kv_tokens > 1.9 * one.kv_tokens and two.kv_bytes_per_token == one.kv_bytes_per_token


def test_drafts_shorten_small_batches_only() -> None:
    measured = find_measured("h200", "llama-8b", "plain")
    assert measured is not None
    base = StepCostTable.from_data(measured)
    drafted = find_drafted_costs(base, "llama-8b", "plain", 3.0476)
    assert drafted is not None
    assert drafted.step_seconds(1, 640) == pytest.approx(1.5941e-3, rel=0.01)
    assert drafted.step_seconds(128, 128 * 640) == base.step_seconds(128, 128 * 640)
    prompt = base.step_seconds(8, 8 * 640, 2048, 2048**2 / 2) - base.step_seconds(8, 8 * 640)
    assert drafted.step_seconds(8, 8 * 640, 2048, 2048**2 / 2) - drafted.step_seconds(8, 8 * 640) == pytest.approx(
        prompt
    )
    assert find_drafted_costs(base, "qwen3-30b-a3b", "plain", 3.0) is None


def test_drafts_are_a_kind_of_their_own_where_they_were_measured() -> None:
    kinds = list_kinds("llama-3.1-8b", tokens_per_step=3.0)
    assert [name for name, kind in kinds.items() if kind.drafts] == ["plain drafts", "packed drafts"]
    assert kinds["plain drafts"].kv_tokens < kinds["plain"].kv_tokens


def test_stored_quantised_weights_are_planned_as_they_are() -> None:
    kinds = list_kinds("gpt-oss-120b", max_gpus=1)
    assert list(kinds) == ["stored"]
    with pytest.raises(InvalidRequest, match="quantised weights"):
        list_kinds("gpt-oss-120b", weights=("packed",))


def test_h100_is_projected_from_the_h200() -> None:
    kinds, _ = list_worker_kinds(read_config("llama-3.1-8b"), find_gpu_speed("h100"), WorkerOptions(max_gpus=1))
    plain = next(kind for kind in kinds if kind.name == "plain")
    assert plain.basis == "projected" and "h200-engine.json" in plain.source
    assert 1.2 < plain.costs.step_seconds(1, 640) / list_kinds("llama-3.1-8b")["plain"].costs.step_seconds(1, 640) < 1.5
