"""run_job: runs a job's requests on an engine in this process, and records when each token was returned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from emberline.bench.gpu.model import LLAMA_8B
from emberline.bench.job import BenchJob, TokenTimeline
from emberline.core.errors import EmberlineError
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.models.config import ModelConfig

CONFIG = ModelConfig.from_hf(LLAMA_8B)
VOCAB = 128_000  # prompts contain only ids below it, so no special tokens
JOB_TIMEOUT_S = 60.0

GREEDY = SamplingParams()
_runs = count()  # numbers the runs, so that request ids are unique

Clock = Callable[[], float]


class MeasuredEngine(Protocol):
    """The interface of an engine that is measured: Emberline's engine, or a wrapper of another engine (a peer)."""

    @property
    def idle(self) -> bool: ...

    def add(self, submission: Submission) -> None: ...

    def abort(self, submission_id: str) -> None: ...

    def step(self) -> list[Output]: ...


@dataclass(frozen=True, slots=True)
class JobRun:
    """The result of a job: when each token was returned, and how much CPU time this process used."""

    timeline: TokenTimeline
    step_times: list[tuple[float, float]]  # (seconds, CPU seconds) since submission, at the start and after each step

    def cpu_percent(self, begin: float, end: float) -> float:
        """Return this process's CPU time between two times of the run, as a percentage of one core."""
        within = [mark for mark in self.step_times if begin <= mark[0] <= end]
        (t0, cpu0), (t1, cpu1) = within[0], within[-1]
        return 100.0 * (cpu1 - cpu0) / (t1 - t0)


RunJob = Callable[[BenchJob, float], JobRun]  # runs a job with a timeout in seconds


@dataclass(frozen=True, slots=True)
class SteadyPhase:
    """The period of a job in which every request decodes and none is in prefill."""

    begin: float
    end: float
    steps: int
    context: float  # average number of keys per query

    @staticmethod
    def from_timeline(job: BenchJob, timeline: TokenTimeline) -> SteadyPhase:
        begin, end = timeline.full_batch_period
        # A peer returns the tokens of one step at slightly different times, so a token of some requests may lie outside
        # of the bounds. The request with the most tokens has none outside.
        steps = max(sum(begin < t <= end for t in times) for times in timeline.times)
        if steps < 1:
            raise EmberlineError(
                "at no time were all requests of the job decoding at once", hint="use a larger KV cache"
            )
        keys = [
            len(prompt) + i
            for prompt, times in zip(job.prompts, timeline.times, strict=True)
            for i, t in enumerate(times)
            if begin < t <= end
        ]
        return SteadyPhase(begin, end, steps, sum(keys) / len(keys))

    @property
    def step_seconds(self) -> float:
        return (self.end - self.begin) / self.steps


def make_submission(
    request_id: str, prompt: list[int], max_tokens: int, base_params: SamplingParams = GREEDY
) -> Submission:
    params = replace(base_params, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Submission(request_id, prompt, params, timeout=math.inf)


def run_job(
    engine: MeasuredEngine,
    job: BenchJob,
    timeout_s: float = JOB_TIMEOUT_S,
    clock: Clock = time.perf_counter,
    cpu_clock: Clock = time.process_time,
    params: SamplingParams = GREEDY,
) -> JobRun:
    """Submit all requests at once and run engine steps until all have ended.

    The time of a token is the time at which its step returned. Raises EmberlineError if a request fails or the job
    takes longer than `timeout_s`.
    """
    run = next(_runs)
    index = {f"job{run}-{i}": i for i in range(len(job.prompts))}
    times: list[list[float]] = [[] for _ in index]
    began, cpu_began = clock(), cpu_clock()
    marks = [(0.0, 0.0)]
    for name, i in index.items():
        engine.add(make_submission(name, job.prompts[i], job.outputs[i], params))
    while not engine.idle:
        outputs = engine.step()
        now = clock() - began
        marks.append((now, cpu_clock() - cpu_began))
        for output in outputs:
            if (at := index.get(output.id)) is None:
                continue  # the end of a request of an earlier, aborted run
            if output.error is not None:
                raise EmberlineError(output.error)
            times[at] += [now] * len(output.tokens)
        if now > timeout_s:
            _abort_requests(engine, index)
            done = f"{sum(map(len, times))} of {sum(job.outputs)} tokens"
            raise EmberlineError(f"job timed out after {now:.0f} s with {done}")
    timeline = TokenTimeline(times)
    timeline.check_token_counts(job)
    return JobRun(timeline, marks)


def _abort_requests(engine: MeasuredEngine, request_ids: dict[str, int], max_steps: int = 100) -> None:
    """Abort the requests and run steps until they have ended, so that they do not affect the next measurement."""
    for name in request_ids:
        engine.abort(name)
    while (engine.step() or not engine.idle) and (max_steps := max_steps - 1):
        pass
