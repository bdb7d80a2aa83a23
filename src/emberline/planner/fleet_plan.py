"""plan_fleet: finds topologies that serve given traffic within latency targets, and verifies them by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.planner.accuracy import SimulationError
from emberline.planner.gpu_speeds import GPUSpeed
from emberline.planner.measured_figures import MAX_DRAFT_TOKENS, START_S
from emberline.planner.search import Candidate, find_candidates
from emberline.planner.sensitivity import Sensitivity, analyse_sensitivity
from emberline.planner.topology import PlanningTask
from emberline.planner.worker_kind import WorkerOptions, list_worker_kinds

VALIDATED_CANDIDATES = 3


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The settings of a plan, besides traffic and targets. Raises InvalidRequest for values out of range."""

    model: str
    gpu: GPUSpeed
    weights: tuple[str, ...] = ()  # formats to consider; empty: all
    # Tokens that a request gets in a step with speculative decoding; None: without it.
    tokens_per_step: float | None = None
    gpu_price: float | None = None  # price of one GPU for an hour
    start_seconds: float | None = None  # seconds until a started worker is ready; None: as measured with Llama-3.1-8B
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("tokens_per_step", 1.0, 1.0 + MAX_DRAFT_TOKENS),
            ("gpu_price", 0.0, 1e6),
            ("start_seconds", 0.0, 86_400.0),
        ):
            if (value := getattr(self, name)) is not None and not low <= value <= high:
                message = f"{name} is {value}; it must be from {low:g} to {high:g}"
                raise InvalidRequest(message, param=name)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    settings: PlanSettings
    task: PlanningTask
    candidates: tuple[Candidate, ...]  # the best first
    sensitivity: Sensitivity  # what other traffic would do to the best candidate
    rejected: Mapping[str, str]  # kinds of workers that do not fit, and why
    accuracy: SimulationError

    def choose_for_validation(self) -> list[Candidate]:
        """Return up to three candidates that meet the targets, the best first, for a test on hardware."""
        met = [each for each in self.candidates if each.meets_targets]
        return met[:VALIDATED_CANDIDATES]


def plan_fleet(
    config: Mapping[str, Any], settings: PlanSettings, task: PlanningTask, accuracy: SimulationError
) -> FleetPlan:
    """Plan a fleet that serves the model of a config.json.

    Raises ModelError if no worker can hold the model, InvalidRequest if the budget does not suffice for the targets."""
    if task.max_gpus is not None and task.max_gpus < 1:
        message = f"max_gpus is {task.max_gpus}; it must be at least 1"
        raise InvalidRequest(message, param="max_gpus", hint="set --max-gpus to 1 or more, or drop it")
    options = WorkerOptions(
        weights=settings.weights,
        max_gpus=task.max_gpus,
        longest_request=task.traffic.longest_request,
        tokens_per_step=settings.tokens_per_step,
    )
    kinds, rejected = list_worker_kinds(config, settings.gpu, options)
    candidates: Sequence[Candidate] = find_candidates(kinds, task, settings.seed)
    start_s = START_S if settings.start_seconds is None else settings.start_seconds
    sensitivity = analyse_sensitivity(kinds, candidates, task, start_s, settings.seed)
    return FleetPlan(settings, task, tuple(candidates), sensitivity, rejected, accuracy)
