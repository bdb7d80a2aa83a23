"""Finds the measured cost table of a model, projects step costs, and compares projections with measured steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from emberline.core.engine_config import EngineConfig
from emberline.core.step_costs import StepCostData, count_prompt_pairs
from emberline.engine.gpu_plan import plan_gpus
from emberline.models.config_outline import read_outline
from emberline.models.outline import ModelOutline
from emberline.planner.gpu_speeds import GPUSpeed, find_gpu_speed
from emberline.planner.measured_figures import RANK_SHAPE, RANK_STEPS_MS
from emberline.planner.step_costs import NO_CORRECTION, CostCorrection, ProjectedCosts
from emberline.planner.step_work import StepWork
from emberline.sim.costs import list_cost_tables

SHAPES_FILE = "shapes.json"  # package data: config.json of each shape that was measured
MEASURED_GPU = "H200"  # GPU whose measured steps correct projections
ERROR_QUANTILE = 0.9
RANK_CONTEXT = 640  # mean tokens of a request in the measured steps of a rank: 512 to 768
UNCORRECTED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class ProjectionError:
    """The errors of uncorrected projections, as shares of the measured step times, over the steps of all shapes."""

    steps: int  # number of compared steps
    median: float
    p90: float
    expert_prompts: float  # the largest for prompts of models with experts


@cache
def read_measured_shapes() -> dict[str, dict[str, Any]]:
    """Return the config.json of each measured shape, by the name of the shape."""
    shapes: dict[str, dict[str, Any]] = json.loads(files("emberline.planner").joinpath(SHAPES_FILE).read_text("utf-8"))
    return shapes


def find_shape_name(outline: ModelOutline) -> str:
    """Return the name of the measured shape that has the sizes in `outline`, or "" if there is none."""
    wanted = _without_context(outline)
    shapes = read_measured_shapes().items()
    return next((name for name, config in shapes if _without_context(read_outline(config)) == wanted), "")


def _without_context(outline: ModelOutline) -> ModelOutline:
    """Return the outline without the fields that do not change a step's time: family, contexts, rotary tables."""
    return replace(outline, model_type="", max_context=0, longest_context=0, rope_values=0)


def find_measured(gpu: str, shape: str, weights: str) -> StepCostData | None:
    """Return the measured steps, or None if these weights of this shape were not measured on the GPU."""
    for data in list_cost_tables():
        if (data.gpu.upper(), data.shape, data.weights) == (gpu.upper(), shape, weights):
            return data
    return None


def make_correction(measured: StepCostData) -> CostCorrection:
    """Return the correction that makes projected costs agree with the measured steps of one GPU."""
    costs = project_costs(read_measured_shapes()[measured.shape], find_gpu_speed(measured.gpu), measured.weights)
    ratios: dict[int, float] = {}
    for step in measured.measured:
        pairs = count_prompt_pairs(step.start, step.prompt)
        attention = costs.attention_seconds(step.rows, step.rows * step.context, pairs)
        products = costs.step_seconds(step.rows, step.rows * step.context, step.prompt, pairs) - attention
        ratios.setdefault(step.tokens, (step.seconds - attention) / products)
    return CostCorrection(tuple(sorted(ratios.items())))


@cache
def make_rank_correction(weights: str, ranks: int) -> CostCorrection:
    """Return the correction that makes projected costs agree with the measured steps of one rank of a large model.

    Steps with prompts were not measured on a rank, so steps of UNCORRECTED_TOKENS or more are not corrected."""
    costs = project_costs(read_measured_shapes()[RANK_SHAPE], find_gpu_speed(MEASURED_GPU), weights, ranks=ranks)
    ratios = {UNCORRECTED_TOKENS: 1.0}
    for rows, milliseconds in RANK_STEPS_MS[weights, ranks].items():
        context = rows * RANK_CONTEXT
        attention = costs.attention_seconds(rows, context, 0.0)
        others = attention + costs.collective_seconds(rows, rows)
        ratios[rows] = (milliseconds / 1e3 - attention) / (costs.step_seconds(rows, context) - others)
    return CostCorrection(tuple(sorted(ratios.items())))


@cache
def projection_error() -> ProjectionError:
    """Compare projections with all measured steps of GPUs."""
    errors: list[float] = []
    expert_prompts = 0.0
    for data in list_cost_tables():
        if (config := read_measured_shapes().get(data.shape)) is None:
            continue
        costs = project_costs(config, find_gpu_speed(data.gpu), data.weights)
        for step in data.measured:
            pairs = count_prompt_pairs(step.start, step.prompt)
            projected = costs.step_seconds(step.rows, step.rows * step.context, step.prompt, pairs)
            errors.append(abs(projected / step.seconds - 1.0))
            if step.prompt and costs.work.experts:
                expert_prompts = max(expert_prompts, errors[-1])
    errors.sort()
    p90 = errors[int(ERROR_QUANTILE * len(errors))]
    return ProjectionError(len(errors), errors[len(errors) // 2], p90, expert_prompts)


def project_costs(
    config: dict[str, Any],
    gpu: GPUSpeed,
    weights: str,
    correction: CostCorrection = NO_CORRECTION,
    ranks: int = 1,
) -> ProjectedCosts:
    """Return the projected step costs of a model on one GPU, or on several with tensor parallelism."""
    outline, settings = read_outline(config), EngineConfig.build("", weights=weights).with_gpu_defaults()
    work = StepWork.of_plan(plan_gpus(config, gpu.gpus(ranks), settings).best, outline)
    return ProjectedCosts(gpu, work, outline.hidden, ranks, correction=correction)
