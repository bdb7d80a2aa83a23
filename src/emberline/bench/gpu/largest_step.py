"""run_largest_step: the steps of an engine that need the most memory, for comparisons with the memory plan.

Decode steps and short prompts never allocate what the plan must count. So all shapes are captured first, as a server
does in idle time, and steps with a whole budget of prompt tokens, and with as many logits as possible, follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emberline.bench import workload
from emberline.bench.gpu.job_run import run_job
from emberline.core.params import SamplingParams

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import BootedGPUEngine

LOGPROBS = SamplingParams(logprobs=1)  # sampling keeps a copy of the logits then


def run_largest_step(booted: BootedGPUEngine, vocab: int) -> None:
    """Capture all shapes, then compute one prompt of as many tokens as a step may have, and then prompts of as many
    requests as may run, which together have so many tokens. `vocab`: ids of prompt tokens are below it."""
    while booted.runner.prepare_next():
        pass
    config = booted.engine.scheduler.config
    for count in (1, config.max_running):
        length = max(1, min(config.max_batch_tokens // count, booted.engine.max_context - 2))
        run_job(booted.engine, workload.make_job([(length, 1)] * count, vocab), params=LOGPROBS)
