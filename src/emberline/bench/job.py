"""BenchJob: requests that are submitted at once. TokenTimeline: the arrival times of their tokens.

All throughput results are computed here, in the same way for every engine. The module imports only the standard
library, because child processes in other Python environments import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True, slots=True)
class BenchJob:
    prompts: list[list[int]]
    outputs: list[int]  # tokens to generate for each prompt

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def max_request_tokens(self) -> int:
        return max(len(prompt) + output for prompt, output in zip(self.prompts, self.outputs, strict=True))


@dataclass(frozen=True, slots=True)
class TokenTimeline:
    """The arrival times of the output tokens of each request, in seconds since the job was submitted."""

    times: list[list[float]]

    def check_token_counts(self, job: BenchJob) -> None:
        """Raise ValueError if a request has fewer or more tokens than the job asked for."""
        counts = [len(times) for times in self.times]
        if counts != job.outputs:
            raise ValueError(f"the engine returned {sum(counts)} tokens instead of the requested {sum(job.outputs)}")

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.times))

    @property
    def wall_seconds(self) -> float:
        return max(times[-1] for times in self.times)

    @property
    def full_batch_period(self) -> tuple[float, float]:
        """The start and end of the period in which all requests decode and none is in prefill, in seconds."""
        return max(times[0] for times in self.times), min(times[-1] for times in self.times)

    def prefill_rate(self, job: BenchJob) -> float:
        """Return the prompt tokens per second, up to the time when every request has its first token."""
        return job.prompt_tokens / self.full_batch_period[0]

    def decode_rate(self) -> float:
        """Return the output tokens per second in the period in which all requests decode."""
        begin, end = self.full_batch_period
        return sum(begin < t <= end for times in self.times for t in times) / (end - begin)

    def median_step_seconds(self) -> float:
        """Return the median seconds between two tokens of a request in the period in which all requests decode."""
        begin, end = self.full_batch_period
        return median(b - a for times in self.times for a, b in pairwise(times) if begin <= a and b <= end)

    def output_rate(self) -> float:
        """Return the output tokens per second from submission to the last token, with the prefill included."""
        return self.num_tokens / self.wall_seconds
