"""run_largest_steps: runs the steps that need the most memory, to compare the memory they use with the memory plan.

Decode steps and short prompts do not allocate all the memory that the plan must count. So CUDA graphs of further shapes
are captured first, as in a server's idle time. Then steps run with a full budget of prompt tokens, and with as many
logits as possible."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from emberline.bench import workload
from emberline.bench.gpu.job_run import run_job
from emberline.core.params import SamplingParams
from emberline.engine.scheduler import MAX_SCORED_TOKENS

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import BootedGPUEngine

CAPTURE_SECONDS = 5.0  # for capturing shapes; a server with 1,024 requests has hundreds of them
SAMPLED = SamplingParams(logprobs=1)  # sampling keeps a copy of the logits then
SCORED = SamplingParams(logprobs=1, prompt_logprobs=1)


def run_largest_steps(
    booted: BootedGPUEngine,
    vocab: int,
    capture_seconds: float = CAPTURE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Capture CUDA graphs for some seconds, and compute the largest steps. Ids of prompt tokens are below `vocab`.

    One step has a few prompts with as many tokens as a step may have, one has the prompts of as many requests as may
    run, and one has a prompt with log-probabilities for as many tokens as possible."""
    end = clock() + capture_seconds
    while clock() < end and booted.runner.prepare_next():
        pass
    config, longest = booted.engine.scheduler.config, booted.engine.max_context - 2
    whole, rest = divmod(config.max_batch_tokens, longest)
    each = max(1, min(longest, config.max_batch_tokens // config.max_running))
    jobs = (
        ([longest] * whole + [rest] * bool(rest), SAMPLED),
        ([each] * config.max_running, SAMPLED),
        ([min(longest, MAX_SCORED_TOKENS)], SCORED),
    )
    for seed, (lengths, params) in enumerate(jobs):
        job = workload.make_job([(length, 1) for length in lengths], vocab, seed)
        run_job(booted.engine, job, params=params)
