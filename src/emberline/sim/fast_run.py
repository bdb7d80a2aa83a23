"""FastJob: a request at a FastWorker. FastRun: the steps whose total time a FastWorker computes at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from emberline.sim.job import WorkerJob
from emberline.sim.prefix_cache import CachedSegment


@dataclass(slots=True, eq=False)
class FastJob:
    job: WorkerJob
    arrival: float
    first_step: int  # number of the first step that may compute it
    num_known: int  # tokens of prompt and output to compute before it samples
    num_left: int  # tokens to sample
    num_before: int = 0  # tokens that were sampled before its last preemption
    num_computed: int = 0
    num_cached: int = 0
    num_private: int = 0  # tokens in the cache that no other request shares
    held: CachedSegment | None = None
    admitted_at: float = 0.0
    was_chunked: bool = False  # whether an earlier step has computed a part of the prompt
    ready_at: float | None = None  # time at which the copy of its blocks ends; None: no blocks are copied
    joined_step: int | None = None  # number of steps when it sampled its first token; None: it has not
    last_step: int = 0  # number of steps when it samples its last token
    last_token_at: float | None = None  # time of the last token before its last preemption
    is_removed: bool = False

    def context(self, num_steps: int) -> int:
        """Return how many tokens the job's next decode step reads, once the worker has run `num_steps` steps."""
        assert self.joined_step is not None
        return self.num_known + 1 + num_steps - self.joined_step


@dataclass(slots=True)
class FastRun:
    """The work that a FastWorker computes at once, of one of three kinds.

    It is a number of decode steps of the same requests, one step with chunks of prompts, or a wait until KV blocks of
    another worker are copied."""

    start: float
    num_steps: int = 0
    end: float = 0.0
    chunks: list[tuple[FastJob, int]] = field(default_factory=list)
    num_left_rows: int = 0  # decoding jobs that were removed during the run
    # Seconds of the first decode step, and by how many seconds each later step is longer than the step before it.
    first_s: float = 0.0
    growth_s: float = 0.0

    def seconds(self, num_steps: int) -> float:
        """Return the seconds that the first `num_steps` decode steps take."""
        return num_steps * (self.first_s + self.growth_s * (num_steps - 1) / 2)

    def steps_until(self, seconds: float) -> int:
        """Return the smallest number of decode steps, at least 1, that take `seconds` or longer."""
        linear, square = self.first_s - self.growth_s / 2, self.growth_s / 2
        if square <= 0:
            steps = math.ceil(seconds / self.first_s)
        else:
            steps = math.ceil((math.sqrt(linear * linear + 4 * square * max(0.0, seconds)) - linear) / (2 * square))
        steps = max(1, steps)
        if steps > 1 and self.seconds(steps - 1) >= seconds:  # rounding made it one too many
            steps -= 1
        while self.seconds(steps) < seconds:
            steps += 1
        return steps
