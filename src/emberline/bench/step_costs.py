"""`emberline bench step-costs`: measures how long an engine's steps take on this CPU, as a table for the simulator.

The table is in the report's config. It has decode steps for several batch sizes at two lengths of context, and chunks
of prompts with and without tokens before them. From these steps, three times are computed: how much longer a step takes
for each token of context, for each pair of a prompt token and a token that it attends to, and for each decoding
request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from emberline.bench import machine, workload
from emberline.bench.report import BenchReport, current_command, round_significant
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.core.step_costs import MeasuredStep, StepCostData, StepCostTable, count_prompt_pairs
from emberline.hub.source import resolve_model

if TYPE_CHECKING:
    from emberline.engine.loaded_engine import LoadedEngine

DECODE_STEPS = 12  # of each measurement


@dataclass(frozen=True, slots=True)
class StepCostPlan:
    rows: Sequence[int]  # decoding requests in a step
    contexts: Sequence[int]  # tokens, of each of them
    chunks: Sequence[int]  # tokens of a prompt in one step
    threads: int
    rounds: int

    def __post_init__(self) -> None:
        for name in ("rows", "contexts", "chunks"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                hint = f"use numbers above 0, such as --{name} 1,8"
                raise InvalidRequest(f"{name} is {list(values)}; it must be numbers above 0", param=name, hint=hint)
        if len(set(self.contexts)) < 2:
            message = f"contexts is {list(self.contexts)}; two are needed to tell what a token of context adds"
            raise InvalidRequest(message, param="contexts", hint="use for example --contexts 64,512")


class StepTimer:
    """Runs requests on an engine and collects the compute time of each step by its number of tokens."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._engine, self._ids = loaded.engine, count()
        self._rng, self._vocab = np.random.default_rng(0), loaded.engine.runner.vocab_size

    def draw_prompt(self, tokens: int) -> list[int]:
        return workload.draw_random_tokens(tokens, self._rng, self._vocab)

    def run(self, prompts: Iterable[list[int]], output_tokens: int) -> list[tuple[int, float]]:
        """Run requests to their end and return (tokens, seconds) of each step."""
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            self._engine.add(Submission(f"step-{next(self._ids)}", prompt, params, timeout=math.inf))
        steps = []
        while not self._engine.idle:
            self._engine.step()
            stats = self._engine.stats()
            steps.append((stats.step_tokens, stats.step_seconds))
        return steps


def bench(model: str, plan: StepCostPlan) -> BenchReport:
    data = measure_step_costs(model, plan)
    report = BenchReport("step-costs", {"model": model, **asdict(plan), "table": asdict(data)})
    table = StepCostTable.from_data(data)
    for step in data.measured:
        name = f"decode_b{step.rows}_at_{step.context:g}" if step.rows else f"prompt_{step.prompt}_after_{step.start}"
        fitted = table.step_seconds(
            step.rows, step.rows * step.context, step.prompt, count_prompt_pairs(step.start, step.prompt)
        )
        report.add(name, 1e3 * step.seconds, "ms")
        report.add(f"{name}/table", 1e3 * fitted, "ms")
    return report


def measure_step_costs(model: str, plan: StepCostPlan) -> StepCostData:
    """Load the model on this CPU, measure steps, and return them with the fitted times per token, pair and request."""
    from emberline.engine.boot import boot  # imports torch

    longest = max(plan.chunks)
    loaded = boot(
        EngineConfig.build(
            str(resolve_model(model)),
            device="cpu",
            threads=plan.threads,
            max_batch_tokens=max(longest, *plan.rows),
            max_running=max(plan.rows),
        )
    )
    timer = StepTimer(loaded)
    timer.run([timer.draw_prompt(longest)], DECODE_STEPS)  # warm-up
    measured = [
        *(_measure_decode(timer, rows, context, plan.rounds) for context in plan.contexts for rows in plan.rows),
        *(_measure_chunk(timer, chunk, 0, plan.rounds) for chunk in plan.chunks),
        _measure_chunk(timer, longest, longest, plan.rounds),
    ]
    context_seconds = _fit_context(measured)
    return StepCostData(
        gpu=str(machine.describe_hardware()["cpu"]),
        shape=model,
        weights="plain",
        sources=[current_command()],
        measured=measured,
        context_seconds=context_seconds,
        pair_seconds=_fit_pairs(measured, longest),
        row_seconds=_fit_rows(measured, context_seconds),
        kv_bytes_per_token=loaded.kv_bytes // max(loaded.kv_tokens, 1),
        kv_tokens=loaded.kv_tokens,
        notes=f"{plan.threads} threads",
    )


def _measure_decode(timer: StepTimer, rows: int, context: int, rounds: int) -> MeasuredStep:
    """Measure steps in which `rows` requests decode. All have the same prompt, so that it is computed only once."""
    prompt = timer.draw_prompt(max(1, context - DECODE_STEPS // 2))
    timer.run([prompt], 1)
    steps = [step for _ in range(rounds) for step in timer.run([prompt] * rows, DECODE_STEPS)]
    # The first steps also compute the ends of the prompts that are not cached.
    seconds = median(seconds for tokens, seconds in steps if tokens == rows)
    return MeasuredStep(round_significant(seconds), rows=rows, context=context)


def _measure_chunk(timer: StepTimer, chunk: int, start: int, rounds: int) -> MeasuredStep:
    found = []
    for _ in range(rounds):
        before = timer.draw_prompt(start)
        if start:
            timer.run([before], 1)
        steps = timer.run([[*before, *timer.draw_prompt(chunk)]], 1)
        # The last tokens of the prefix are computed again unless they fill a block.
        found.append(max(steps))
    return MeasuredStep(round_significant(median(s for _, s in found)), prompt=found[0][0], start=start)


def _fit_context(measured: Sequence[MeasuredStep]) -> float:
    """Return the seconds that a token of context adds to a decode step; 0 if noise is larger."""
    decode = [step for step in measured if step.rows]
    near, far = min(s.context for s in decode), max(s.context for s in decode)
    seconds = {(step.rows, step.context): step.seconds for step in decode}
    added = [(seconds[n, far] - seconds[n, near]) / (n * (far - near)) for n in sorted({s.rows for s in decode})]
    return max(0.0, round_significant(median(added)))


def _fit_pairs(measured: Sequence[MeasuredStep], chunk: int) -> float:
    """Return the seconds that each pair of a prompt token and an attended token adds; 0 if noise is larger."""
    first, second = (next(s for s in measured if s.prompt == chunk and s.start == start) for start in (0, chunk))
    return max(0.0, round_significant((second.seconds - first.seconds) / (chunk * chunk)))


def _fit_rows(measured: Sequence[MeasuredStep], context_seconds: float) -> float:
    """Return by how many seconds a decoding request costs more than a prompt token; 0 if noise is larger."""
    prompts = {step.prompt: step.seconds for step in measured if step.prompt and not step.start}
    added = [
        (step.seconds - prompts[step.rows]) / step.rows - context_seconds * step.context
        for step in measured
        if step.rows in prompts
    ]
    return max(0.0, round_significant(median(added))) if added else 0.0
