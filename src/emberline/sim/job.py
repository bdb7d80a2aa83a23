"""WorkerJob: a request at one simulated worker. WorkerModel: the interface of simulated workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from emberline.sim.link import KVSource
from emberline.sim.prompt import SimRequest


@dataclass(frozen=True, slots=True)
class WorkerJob:
    id: str
    request: SimRequest
    num_resumed: int = 0  # output tokens that other workers have generated
    source: KVSource | None = None  # where its KV blocks are copied from
    prefill_only: bool = False  # computes the prompt and samples one token; another worker continues

    @property
    def num_known(self) -> int:
        """The number of tokens before the first one that this worker generates."""
        return self.request.num_prompt_tokens + self.num_resumed

    @property
    def num_left(self) -> int:
        """The number of output tokens that this worker generates for the whole job."""
        return 1 if self.prefill_only else self.request.reply.num_tokens - self.num_resumed


class JobOutput(NamedTuple):
    job_id: str
    num_tokens: int
    cached_tokens: int = 0  # prompt tokens that were cached; with the first output only
    is_last: bool = False
    prefill_s: float = 0.0  # seconds from admission to the first token; with the first output only
    was_chunked: bool = False  # whether several steps computed the prompt; with the first output only


class WorkerCounters(NamedTuple):
    """What a worker reports in its heartbeats."""

    running: int
    waiting: int
    loading: int
    steps: int
    kv_usage: float
    busy_seconds: float
    prompt_tokens: int
    generated_tokens: int


class WorkerModel(Protocol):
    """A simulated worker. It computes in runs of one or more steps, which begin and end at known times."""

    name: str

    @property
    def is_idle(self) -> bool: ...

    @property
    def remaining_tokens(self) -> int:
        """The number of tokens, prompt and output, that all open requests of this worker still have to compute."""
        ...

    def add(self, job: WorkerJob, now: float) -> None: ...

    def remove(self, job_id: str, now: float) -> int:
        """End a job early, and return how many tokens it has generated here. Its outputs are not returned later."""
        ...

    def start_run(self, now: float) -> float:
        """Begin the next run, and return the time at which it ends. The worker must not be idle."""
        ...

    def shorten_run(self, now: float) -> float:
        """Let the current run end after the step that computes at `now`, and return the time of its end."""
        ...

    def finish_run(self) -> list[JobOutput]:
        """End the current run and return its outputs."""
        ...

    def take_gaps(self) -> list[tuple[float, int]]:
        """Return the inter-token times since the last call, each with the number of tokens that it applies to."""
        ...

    def num_generated(self, job_id: str, now: float) -> int:
        """Return how many tokens the job has generated here."""
        ...

    def counters(self) -> WorkerCounters: ...

    def check_invariants(self) -> None:
        """Assert that the worker's accounting of memory and requests is consistent."""
        ...
