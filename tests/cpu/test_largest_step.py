"""The largest step of an engine: the bench runs it, and the runner's logits need no more than is planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from host_engine import booted, plain_arithmetic
from tensor_peak import measure_peak
from torch import Tensor

from emberline.bench.gpu.largest_step import run_largest_steps
from emberline.core.params import SamplingParams
from emberline.core.plan import Admission, StepPlan, StepResult, WorkItem
from emberline.engine.gpu.boot import BootedGPUEngine
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.step_peak import COPIES_OF_SAMPLED_ROWS
from emberline.kernels import backend, ops
from emberline.kernels.sampling_arguments import LogProbs

SCORED = 12


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BootedGPUEngine:
    monkeypatch.setattr(backend, "_backend", None)
    plain_arithmetic()
    tiny.write(tmp_path, tiny.config("llama"), seed=1)
    return booted(tmp_path)


def test_the_bench_runs_the_largest_steps(engine: BootedGPUEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts fill the budget of 64 tokens, one step samples for all of 8 requests, and one scores a prompt."""
    plans: list[StepPlan] = []
    launch = GPURunner.launch

    def record(self: GPURunner, plan: StepPlan) -> object:
        plans.append(plan)
        return launch(self, plan)

    monkeypatch.setattr(GPURunner, "launch", record)
    assert engine.runner.num_unprepared > 2
    run_largest_steps(engine, 50)
    assert engine.runner.num_unprepared == 0 and not engine.runner.is_preparing
    tokens = [[len(w.tokens) for w in plan.work] for plan in plans]
    assert any(sum(lengths) == 64 and len(lengths) < 8 for lengths in tokens) and [64 // 8] * 8 in tokens
    assert all(admission.params.logprobs for plan in plans for admission in plan.admitted)
    longest = min(512, engine.engine.max_context - 2)
    assert sum(len(w.tokens) for plan in plans for w in plan.work if w.prompt_logprobs) == longest


def test_the_bench_captures_shapes_for_a_limited_time(engine: BootedGPUEngine) -> None:
    times = iter(range(100))
    count = engine.runner.num_unprepared
    run_largest_steps(engine, 50, capture_seconds=2.5, clock=lambda: float(next(times)))
    assert engine.runner.num_unprepared == count - 2


def test_logits_of_a_step_are_planned(engine: BootedGPUEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps with prompt scores and log-probabilities: the runner's own tensors, without those of the CPU's ops.

    The results of one step are read when the next one was launched. They do not keep its logits."""
    runner, vocab = engine.runner, engine.runner.vocab_size

    def no_log_probs(logits: Tensor, ids: Tensor, top_n: int) -> LogProbs:
        return LogProbs(*(torch.zeros(len(logits), max(1, top_n)) for _ in range(4)))

    monkeypatch.setattr(ops, "sample_with_seed", lambda logits, *rest: torch.zeros(len(logits), dtype=torch.int64))
    monkeypatch.setattr(ops, "log_probs", no_log_probs)
    lengths, params = [SCORED, 3, 3, 3], SamplingParams(max_tokens=2, logprobs=1)
    names = [f"r{i}" for i in range(len(lengths))]
    admitted = [Admission(name, [5] * n, n, params, 0) for name, n in zip(names, lengths, strict=True)]
    work = [
        WorkItem(name, 0, [5] * n, blocks=[i], samples=True, prompt_logprobs=i == 0)
        for i, (name, n) in enumerate(zip(names, lengths, strict=True))
    ]
    results: list[StepResult] = []

    def run() -> None:
        finishing = [runner.launch(StepPlan(step, [] if step else admitted, work, [])) for step in range(2)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("emberline.engine.gpu.sampling.SamplingOutputs.tokens_and_failures", lambda *args: ({}, {}))
            results.extend(finish() for finish in finishing)

    measured = measure_peak(run, lambda tensor: tensor.dim() == 2 and tensor.shape[1] == vocab)
    rows = COPIES_OF_SAMPLED_ROWS * len(lengths) + SCORED
    assert all(len(result.prompt_logprobs["r0"]) == SCORED - 1 for result in results)
    assert rows - 2 <= measured / (4 * vocab) <= rows  # one row both scores the prompt and is sampled
