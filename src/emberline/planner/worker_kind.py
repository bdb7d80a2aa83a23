"""WorkerKind: a way to run one worker, with its memory and step costs. list_worker_kinds finds the kinds that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, InvalidRequest, ModelError
from emberline.core.step_costs import StepCostTable
from emberline.engine.gpu_plan import GPUPlan, plan_gpus
from emberline.models.config_outline import read_outline, select_planned_text
from emberline.models.outline import ModelOutline
from emberline.models.weight_formats import read_weight_formats
from emberline.planner.collective_times import ALL_REDUCE_US
from emberline.planner.drafted_costs import find_drafted_costs
from emberline.planner.gpu_speeds import GPUSpeed
from emberline.planner.measured_figures import DRAFT_HEAD_BYTES, RANK_STEPS_MS, rank_file
from emberline.planner.measured_shapes import (
    MEASURED_GPU,
    find_measured,
    find_shape_name,
    make_correction,
    make_rank_correction,
)
from emberline.planner.step_costs import NO_CORRECTION, ProjectedCosts
from emberline.planner.step_work import StepWork
from emberline.sim.costmodel import StepCosts

Basis = Literal["measured", "projected"]
WEIGHTS = ("plain", "packed", "both", "fp8")
STORED_WEIGHTS = ("auto",)  # the only value for files with quantised weights, which are kept as they are
TENSOR_RANKS = (1, *ALL_REDUCE_US)
STAGES = (1, 2)
MAX_RUNNING = 512  # the workers' setting: more than the default of 256, so that memory is the limit for most models


@dataclass(frozen=True, slots=True)
class WorkerKind:
    weights: str
    tp: int
    pp: int
    costs: StepCosts
    kv_tokens: int  # tokens that the KV caches of all its GPUs hold
    kv_bytes_per_token: int  # bytes of KV cache for a token, on all its GPUs together
    max_running: int
    max_batch_tokens: int
    basis: Basis
    source: str  # result files, or how the costs were projected
    drafts: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def name(self) -> str:
        weights = {"both": "packed+plain", "auto": "stored"}.get(self.weights, self.weights)
        parts = [weights, f"tp{self.tp}" * (self.tp > 1), f"pp{self.pp}" * (self.pp > 1), "drafts" * self.drafts]
        return " ".join(filter(None, parts))

    @property
    def serve_options(self) -> str:
        """The options with which `emberline worker` starts a worker of this kind."""
        options = [f"--weights {self.weights}"] if self.weights != "auto" else []
        options.append(f"--max-running {self.max_running}")
        options += [f"--tp {self.tp}"] * (self.tp > 1) + [f"--pp {self.pp}"] * (self.pp > 1)
        return " ".join([*options, *(["--speculate eagle3:DIR"] * self.drafts)])


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The kinds of workers to consider."""

    weights: tuple[str, ...] = ()  # empty: all
    max_gpus: int | None = None
    longest_request: int = 1
    tokens_per_step: float | None = None  # tokens that a request gets in a step with drafts; None: no drafts


def list_worker_kinds(
    config: Mapping[str, Any], gpu: GPUSpeed, options: WorkerOptions
) -> tuple[list[WorkerKind], dict[str, str]]:
    """Return the kinds of workers that can hold the model, and for each other kind, by name, why it cannot.

    Raises UnsupportedModel or ModelFileError for a config that cannot be planned, ModelError if no kind fits, and
    InvalidRequest if the longest request exceeds the model's context."""
    outline, shape = read_outline(config), find_shape_name(read_outline(config))
    if options.longest_request > outline.longest_context:
        raise InvalidRequest(
            f"the longest request has {options.longest_request} tokens, and the model a context of"
            f" {outline.longest_context}",
            param="traffic",
            hint="plan for shorter requests (in and out), or for another model",
        )
    kinds: list[WorkerKind] = []
    rejected: dict[str, str] = {}
    first_error: ModelError | None = None
    for weights in _weight_choices(config, outline, options):
        for tp in TENSOR_RANKS:
            for pp in STAGES:
                if options.max_gpus is not None and tp * pp > options.max_gpus:
                    continue
                try:
                    kinds += _make_kinds(config, outline, shape, gpu, options, weights, tp, pp)
                except EmberlineError as e:
                    rejected[f"{weights} tp{tp} pp{pp}"] = e.message
                    first_error = e if isinstance(e, ModelError) and first_error is None else first_error
    if not kinds:
        limit = "" if options.max_gpus is None else f" and {options.max_gpus} GPUs (--max-gpus)"
        reason = next(reversed(rejected.values())) if rejected else "every layout has more GPUs"
        raise ModelError(
            f"the model fits no worker of up to {TENSOR_RANKS[-1] * STAGES[-1]} x {gpu.name}{limit}:"
            f" with the most GPUs, {reason}",
            hint="use a GPU with more memory, quantised weights, or shorter requests",
        ) from first_error
    return kinds, rejected


def _weight_choices(config: Mapping[str, Any], outline: ModelOutline, options: WorkerOptions) -> Sequence[str]:
    is_stored = bool(read_weight_formats(select_planned_text(config), outline))
    known = STORED_WEIGHTS if is_stored else WEIGHTS
    if unknown := [name for name in options.weights if name not in known]:
        why = "config.json has quantised weights" if is_stored else "it is not a format that can be planned"
        message = f"weights is {', '.join(unknown)!r}, but {why}"
        raise InvalidRequest(message, param="weights", hint=f"known: {', '.join(known)}")
    return options.weights or known


def _make_kinds(
    config: Mapping[str, Any],
    outline: ModelOutline,
    shape: str,
    gpu: GPUSpeed,
    options: WorkerOptions,
    weights: str,
    tp: int,
    pp: int,
) -> list[WorkerKind]:
    settings = EngineConfig.build("", weights=weights, max_running=MAX_RUNNING).with_gpu_defaults()
    plan = plan_gpus(_stage_config(config, pp), gpu.gpus(tp), settings)
    best = next((each for each in plan.plans if each.sharing in ("one GPU", "tensor parallel")), None)
    if best is None:
        raise ModelError(plan.rejected["tensor parallel"], hint="use more GPUs")
    work = StepWork.of_plan(best, replace(outline, layers=outline.layers[: len(outline.layers) // pp])).of_all_stages(
        pp
    )
    kv_tokens = best.kv_tokens
    if kv_tokens < options.longest_request:
        message = f"the KV cache holds {kv_tokens} tokens, and the longest request has {options.longest_request}"
        raise ModelError(message, hint="use more GPUs for a worker")
    costs, basis, source = _find_costs(gpu, shape, weights, work, outline, tp, pp)
    scheduler = settings.scheduler
    kind = WorkerKind(
        weights=weights,
        tp=tp,
        pp=pp,
        costs=costs,
        kv_tokens=kv_tokens,
        kv_bytes_per_token=_whole_kv_bytes(best, work),
        max_running=scheduler.max_running,
        max_batch_tokens=scheduler.max_batch_tokens,
        basis=basis,
        source=source,
    )
    kinds = [kind]
    if options.tokens_per_step is not None and tp == pp == 1:
        drafted = find_drafted_costs(costs, shape, weights, options.tokens_per_step)
        if drafted is not None:
            left = kv_tokens - DRAFT_HEAD_BYTES[weights] // kind.kv_bytes_per_token
            note = f"{source}, {drafted.source}"
            kinds.append(replace(kind, costs=drafted, kv_tokens=left, source=note, drafts=True))
    return kinds


def _whole_kv_bytes(plan: GPUPlan, work: StepWork) -> int:
    return work.kv_bytes_per_token * plan.gpus.count


def _stage_config(config: Mapping[str, Any], stages: int) -> Mapping[str, Any]:
    """Return the config of one pipeline stage: its share of the layers, and the whole embedding and output head.

    No real stage has more than one of embedding and head, so this overestimates its memory."""
    if stages == 1:
        return config
    text = dict(select_planned_text(config))
    layers = text.get("num_hidden_layers", 0)
    if not isinstance(layers, int) or layers % stages or layers < stages:
        raise ModelError(f"{layers} layers cannot be divided evenly among {stages} stages", hint="use another --pp")
    for name, value in text.items():
        if isinstance(value, list) and len(value) == layers:
            text[name] = value[: layers // stages]
    return {**text, "num_hidden_layers": layers // stages}


def _find_costs(
    gpu: GPUSpeed, shape: str, weights: str, work: StepWork, outline: ModelOutline, tp: int, pp: int
) -> tuple[StepCosts, Basis, str]:
    measured = find_measured(gpu.name, shape, weights)
    if measured is not None and tp == pp == 1:
        return StepCostTable.from_data(measured), "measured", ", ".join(measured.sources)
    sources, correction = ["bytes and arithmetic of a step"], NO_CORRECTION
    if (known := find_measured(MEASURED_GPU, shape, weights)) is not None:
        sources = [f"the share of the GPU's speed in measured steps ({', '.join(known.sources)})"]
        correction = make_correction(known)
    if tp > 1:
        # The steps of a rank were measured with small batches, for which the format "both" reads the packed weights.
        rank_weights = "packed" if weights == "both" else weights
        if (rank_weights, tp) in RANK_STEPS_MS:
            correction = correction.combine(make_rank_correction(rank_weights, tp))
            sources.append(f"steps of one rank ({rank_file(rank_weights, tp)})")
        sources.append("published times of collectives")
    return ProjectedCosts(gpu, work, outline.hidden, tp, pp, correction), "projected", ", ".join(sources)
