"""SimRunner: a runner that computes nothing and advances a virtual clock by the estimated time of each step."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from emberline.core.clock import ManualClock
from emberline.core.plan import SampledToken, StepPlan, StepResult
from emberline.sim.costmodel import StepCosts
from emberline.sim.prompt import VOCAB_SIZE

TokenSource = Callable[[str, int], int]  # the token of a request at a position


def hash_token(request_id: str, position: int) -> int:
    digest = blake2b(f"{request_id}:{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


class SimRunner:
    """Simulates a device that computes one step at a time. `token_at` determines the sampled tokens."""

    layout = "sim"
    vocab_size = VOCAB_SIZE
    eos: frozenset[int] = frozenset()

    def __init__(self, num_blocks: int, costs: StepCosts, clock: ManualClock, token_at: TokenSource) -> None:
        self.num_blocks = num_blocks
        self.num_steps, self.busy_seconds = 0, 0.0
        self._costs = costs
        self._clock = clock
        self._token_at = token_at
        self.last_chunk_starts: dict[str, int] = {}  # by request: first token of its last prompt chunk

    def run(self, plan: StepPlan) -> StepResult:
        result = self._compute(plan)
        self._clock.advance(result.seconds)
        return result

    def _compute(self, plan: StepPlan) -> StepResult:
        seconds = self._costs.estimate_step_seconds(plan) if plan.work else 0.0
        self.num_steps += 1
        self.busy_seconds += seconds
        for work in plan.work:
            if work.samples:
                self.last_chunk_starts.setdefault(work.id, work.start)
        ends = [(work.id, work.start + len(work.tokens)) for work in plan.work if work.samples]
        return StepResult(
            plan.step, {name: SampledToken(self._token_at(name, end)) for name, end in ends}, seconds=seconds
        )


class PipelinedSimRunner(SimRunner):
    """Simulates a GPU: a step is planned while the one before it runs, so a new request waits for one step more."""

    def __init__(self, num_blocks: int, costs: StepCosts, clock: ManualClock, token_at: TokenSource) -> None:
        super().__init__(num_blocks, costs, clock, token_at)
        self._free_at = 0.0  # time at which the device has computed all launched steps

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Queue a step behind the launched ones; the returned function waits for its end in virtual time."""
        result = self._compute(plan)
        self._free_at = ends = max(self._free_at, self._clock.time) + result.seconds

        def wait() -> StepResult:
            self._clock.time = max(self._clock.time, ends)
            return result

        return wait


def make_sim_runner(
    num_blocks: int, costs: StepCosts, clock: ManualClock, token_at: TokenSource = hash_token
) -> SimRunner:
    return (PipelinedSimRunner if costs.plans_ahead else SimRunner)(num_blocks, costs, clock, token_at)
