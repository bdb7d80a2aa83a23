"""A FleetPlan as a JSON object, with the basis of each figure: measured, projected, simulated or estimated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from emberline.planner.fleet_plan import FleetPlan
from emberline.planner.gpu_speeds import MEASURED_GPU
from emberline.planner.measured_figures import START_FILE, START_S
from emberline.planner.measured_shapes import projection_error
from emberline.planner.search import Candidate
from emberline.planner.topology import PlannedPool
from emberline.planner.verification import SimulatedLoad
from emberline.planner.worker_kind import WorkerKind

SECONDS_PER_HOUR = 3600.0
COST_TOKENS = 1e6
NOT_MEASURED = "not measured"


def report_plan(plan: FleetPlan) -> dict[str, Any]:
    """Return the plan as a JSON object. Times are milliseconds unless their name says otherwise."""
    traffic, slo = plan.task.traffic, plan.task.slo
    return {
        "model": plan.settings.model,
        "gpu": plan.settings.gpu.name,
        "gpu_note": plan.settings.gpu.note,
        "seed": plan.settings.seed,
        "traffic": {
            "description": traffic.description,
            "requests_per_second": traffic.rate,
            "mean_prompt_tokens": round(traffic.mean_prompt, 1),
            "p90_prompt_tokens": traffic.p90_prompt,
            "mean_output_tokens": round(traffic.mean_output, 1),
            "shared_prefix_share": traffic.prefix_share,
        },
        "slo": {"ttft_p90_ms": _ms(slo.ttft_p90), "itl_p90_ms": _ms(slo.itl_p90)},
        "max_gpus": plan.task.max_gpus,
        "gpu_price": plan.settings.gpu_price,
        "candidates": [_report_candidate(plan, each) for each in plan.candidates],
        "validate": [str(each.topology) for each in plan.choose_for_validation()],
        "sensitivity": _report_sensitivity(plan),
        "does_not_fit": dict(plan.rejected),
        "basis": list(_list_basis(plan)),
    }


def _report_candidate(plan: FleetPlan, candidate: Candidate) -> dict[str, Any]:
    topology = candidate.topology
    return {
        "topology": str(topology),
        "is_split": topology.is_split,
        "gpus": topology.gpus,
        "meets_slo": candidate.meets_targets,
        **_report_load(candidate.load),
        **_report_cost(plan, topology.gpus),
        "step_costs": topology.basis,
        "changes_output": not topology.is_lossless,
        "pools": [_report_pool(plan, pool) for pool in topology.pools],
        "simulated": {
            "requests": candidate.load.requests,
            "unanswered": candidate.load.unanswered,
            "engines": candidate.load.engines,
            "traffic_share": round(candidate.load.traffic_share, 4),
            "seconds": round(candidate.load.seconds, 2),
            "cached_share": round(candidate.load.cached_share, 4),
        },
        "estimated": {
            "ttft_p90_ms": _ms(topology.estimate.ttft_p90),
            "itl_p90_ms": _ms(topology.estimate.itl_p90),
        },
    }


def _report_load(load: SimulatedLoad) -> dict[str, float | None]:
    names = ("ttft_p50", "ttft_p90", "itl_p50", "itl_p90")
    return {f"{name}_ms": _ms(getattr(load, name)) for name in names}


def _report_pool(plan: FleetPlan, pool: PlannedPool) -> dict[str, Any]:
    kind = pool.kind
    options = [kind.serve_options, "" if pool.role == "both" else f"--role {pool.role}"]
    if pool.role == "both":
        options.append(f"--itl-target-ms {_ms(plan.task.engine_itl_target_s):g}")
    return {
        "role": pool.role,
        "workers": pool.count,
        "gpus_each": kind.gpus,
        "weights": kind.weights,
        "tp": kind.tp,
        "pp": kind.pp,
        "drafts": kind.drafts,
        "kv_tokens_each": kind.kv_tokens,
        "worker_options": " ".join(filter(None, options)),
        "step_costs": kind.basis,
        "source": kind.source,
    }


def _report_cost(plan: FleetPlan, gpus: int) -> dict[str, float | None]:
    """Return GPU-hours and cost of a million tokens: of prompts and outputs together, and of outputs alone."""
    traffic, price = plan.task.traffic, plan.settings.gpu_price
    hours = gpus / SECONDS_PER_HOUR * COST_TOKENS
    each, output = hours / traffic.tokens_per_second, hours / (traffic.rate * traffic.mean_output)
    return {
        "gpu_hours_per_million_tokens": round(each, 6),
        "gpu_hours_per_million_output_tokens": round(output, 6),
        "cost_per_million_tokens": None if price is None else round(each * price, 6),
        "cost_per_million_output_tokens": None if price is None else round(output * price, 6),
        "cost_per_hour": None if price is None else round(gpus * price, 4),
    }


def _report_sensitivity(plan: FleetPlan) -> dict[str, Any]:
    found = plan.sensitivity
    return {
        "topology": str(plan.candidates[0].topology),
        "traffic": [
            {
                "factor": each.factor,
                "requests_per_second": round(each.rate, 4),
                **_report_load(each.load),
                "meets_slo": each.meets_targets,
                "gpus_needed": each.gpus,
            }
            for each in found.traffic
        ],
        "prefix": [{"shared_prefix_share": each.share, "gpus_needed": each.gpus} for each in found.prefix],
        "start": [{"start_seconds": each.start_s, "ttft_p90_ms": _ms(each.ttft_s)} for each in found.start],
        "curve": [{"requests_per_second": round(rate, 4), "gpus": gpus} for rate, gpus in found.curve],
    }


def _list_basis(plan: FleetPlan) -> Iterator[dict[str, str]]:
    """Yield the basis of each kind of figure in the plan, with its source and its error."""
    kinds = {pool.kind.name: pool.kind for candidate in plan.candidates for pool in candidate.topology.pools}
    for name, kind in kinds.items():
        yield _basis(f"step costs, {name}", kind.basis, kind.source, _describe_cost_error(kind))
    if plan.settings.gpu.note:
        source = f"data sheet, at the share of it that an {MEASURED_GPU} reaches"
        yield _basis(f"speed of the {plan.settings.gpu.name}", "computed", source, NOT_MEASURED)
    how = "virtual clock, production router, scheduler and KV manager"
    if any(each.topology.is_split for each in plan.candidates):
        how += "; of prefill and decode workers, runs of steps at once"
    errors = plan.accuracy.describe()
    if any(kind.basis == "projected" for kind in kinds.values()):
        errors += ", with measured step costs; those of projected ones add to it"
    yield _basis("latencies of candidates", "simulated", how, errors)
    if plan.settings.tokens_per_step is not None:
        yield _basis("tokens per step with drafts", "given", "--tokens-per-step", "depends on the traffic")
    link = plan.task.link
    if any(each.topology.is_split for each in plan.candidates):
        yield _basis(f"handoff link, {link.name}", link.basis, link.source, NOT_MEASURED)
    memory = "layout of weights and KV cache from config.json"
    yield _basis("memory", "projected", memory, "up to 2 % of the GPU's memory (h200-int4.json, h200-moe-2.json)")
    yield _basis(
        "GPUs at other traffic or prefix reuse", "estimated", "formulas, shifted to the simulated count", NOT_MEASURED
    )
    start = plan.settings.start_seconds
    given = _basis("start time", "given", "--start-seconds", NOT_MEASURED)
    measured = _basis(f"start time, {START_S:.1f} s", "measured", f"{START_FILE}, Llama-3.1-8B", "other models differ")
    yield measured if start is None else given
    if plan.settings.gpu_price is not None:
        yield _basis("price", "given", "--gpu-price", "GPUs only: no host, network or storage")


def _describe_cost_error(kind: WorkerKind) -> str:
    if kind.basis == "measured":
        return "interpolated between measured steps"
    error = projection_error()
    text = f"without correction: median {100 * error.median:.0f} %, p90 {100 * error.p90:.0f} %"
    text += f" over {error.steps} measured steps, up to {100 * error.expert_prompts:.0f} % for prompts with experts"
    return text + "; on several GPUs: not measured" * (kind.gpus > 1)


def _basis(figure: str, basis: str, source: str, error: str) -> dict[str, str]:
    return {"figure": figure, "basis": basis, "source": source, "error": error}


def _ms(seconds: float) -> float | None:
    """Return milliseconds; None for infinite times, which JSON does not have."""
    return round(seconds * 1e3, 3) if math.isfinite(seconds) else None
