"""The load of `emberline bench sim-accuracy`: requests at random times, and the measured latencies.

A real cluster and a simulated one get the same requests at the same times."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from emberline.bench import workload
from emberline.bench.client import CompletionClient, RequestTrace
from emberline.bench.workload import LogNormal
from emberline.core.errors import EmberlineError

DRAIN_TIMEOUT_S = 120.0  # for requests that are open when the last one arrives


@dataclass(frozen=True, slots=True)
class TimedRequest:
    due: float  # seconds after the start of the load
    prompt: list[int]
    output: int


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The distributions of the lengths of prompts and outputs, in tokens."""

    prompt: LogNormal
    output: LogNormal
    vocab_size: int

    def draw_requests(self, due_times: Sequence[float], seed: int) -> list[TimedRequest]:
        lengths = workload.draw_lognormal_lengths(len(due_times), self.prompt, self.output, seed)
        job = workload.make_job(lengths, self.vocab_size, seed)
        return [TimedRequest(*each) for each in zip(due_times, job.prompts, job.outputs, strict=True)]

    def draw_poisson(self, rate: float, seconds: float, seed: int) -> list[TimedRequest]:
        """Return requests that arrive at random times, `rate` of them per second on average."""
        waits = np.random.default_rng(seed).exponential(1 / rate, max(1, round(rate * seconds)))
        return self.draw_requests(np.cumsum(waits).tolist(), seed)

    def draw_other_tokens(self, requests: Sequence[TimedRequest], seed: int) -> list[TimedRequest]:
        """Return requests with the same times and lengths but other tokens, which no prefix cache holds."""
        job = workload.make_job([(len(each.prompt), each.output) for each in requests], self.vocab_size, seed)
        return [replace(each, prompt=prompt) for each, prompt in zip(requests, job.prompts, strict=True)]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The latencies of all requests in seconds, and the tokens per second from the first arrival to the last token."""

    ttft_p50: float
    ttft_p90: float
    itl_p50: float
    itl_p90: float
    output_rate: float
    itl_mean: float = math.nan
    ttft_mean: float = math.nan

    @staticmethod
    def from_times(due_times: Sequence[float], token_times: Sequence[Sequence[float]]) -> LoadResult:
        """Compute latencies from the times of each request's tokens, which are on the same clock as `due_times`."""
        ttft = [times[0] - due for due, times in zip(due_times, token_times, strict=True)]
        gaps = [b - a for times in token_times for a, b in pairwise(times)]
        tokens = sum(map(len, token_times))
        rate = tokens / (max(times[-1] for times in token_times) - min(due_times))
        (ttft_p50, ttft_p90), (itl_p50, itl_p90) = (np.percentile(values, (50, 90)).tolist() for values in (ttft, gaps))
        itl_mean = sum(gaps) / len(gaps) if gaps else math.nan
        return LoadResult(ttft_p50, ttft_p90, itl_p50, itl_p90, rate, itl_mean, sum(ttft) / len(ttft))


async def measure_load(client: CompletionClient, requests: Sequence[TimedRequest]) -> LoadResult:
    """Send the requests when they are due, and return what the client measured. Raises EmberlineError if one fails."""
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    loop_began = loop.time()

    async def send_when_due(request: TimedRequest) -> RequestTrace:
        await asyncio.sleep(request.due - (loop.time() - loop_began))
        return await client.complete(request.prompt, request.output)

    async with asyncio.timeout(requests[-1].due + DRAIN_TIMEOUT_S):
        traces = await asyncio.gather(*map(send_when_due, requests))
    for trace, request in zip(traces, requests, strict=True):
        if trace.error is not None or trace.tokens != request.output:
            message = f"a request failed: {trace.error or f'{trace.tokens} of {request.output} tokens'}"
            raise EmberlineError(message, hint="see the logs of the workers")
    times = [[at - began for at in trace.event_times] for trace in traces]
    return LoadResult.from_times([request.due for request in requests], times)
