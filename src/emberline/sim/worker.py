"""SimWorker: a production Engine whose runner computes nothing and only advances a virtual clock."""

from __future__ import annotations

from hashlib import blake2b

from emberline.core.blockbatch import BlockBatch
from emberline.core.clock import ManualClock
from emberline.core.config import SchedulerConfig
from emberline.core.events import Output
from emberline.core.plan import Sampled, StepPlan, StepResult
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.ledger import Ledger
from emberline.kv.tiers.base import Tier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.router.chains import Link
from emberline.sim.costmodel import CostModel
from emberline.tokens.blockhash import last_full, root_hash

VOCABULARY = 100_000
BUFFER = 8  # size of a simulated block; its content does not matter
STAGED = 512  # blocks between the cache and the store


class SimRunner:
    """Advances the worker's clock by the cost of each plan; tokens follow from request id and position."""

    layout = "sim"
    vocab_size = VOCABULARY
    eos: frozenset[int] = frozenset()

    def __init__(self, num_blocks: int, cost: CostModel, clock: ManualClock) -> None:
        self.num_blocks = num_blocks
        self._cost = cost
        self._clock = clock

    def run(self, plan: StepPlan) -> StepResult:
        seconds = self._cost.seconds(plan) if plan.work else 0.0
        self._clock.advance(seconds)
        ends = [(work.id, work.start + len(work.tokens)) for work in plan.work if work.samples]
        return StepResult(plan.step, {name: Sampled(_token(name, end)) for name, end in ends}, seconds=seconds)


class SimWorker:
    def __init__(
        self, name: str, config: SchedulerConfig, kv_tokens: int, cost: CostModel, store: Store | None
    ) -> None:
        self.name = name
        self.clock = ManualClock()
        self.stepping = False  # the end of its step is a scheduled event
        self._store = store
        self._tiers = None
        if store is not None:
            host = HostTier(BUFFER, STAGED * 4096, "lru")
            self._tiers = TierStack(host, [store.tier], clock=self.clock, threads=False)
        runner = SimRunner(kv_tokens // config.block_size, cost, self.clock)
        self.engine = Engine(config, runner, self.clock, self._tiers)
        self._ledger = Ledger([name])
        self._until = 0.0

    def add(self, submission: Submission, now: float) -> None:
        self.engine.add(submission, arrival=now)

    def step(self, now: float) -> tuple[list[Output], float]:
        """Run a step that begins at `now`; return its outputs and the time when it ends."""
        self.clock.time = now
        self._move(now)
        outputs = self.engine.step()
        loading = self.engine.scheduler.num_loading
        if (
            self.clock.time == now and loading and self._store is not None
        ):  # nothing to compute: wait for blocks of the store
            self.clock.time = max(now, self._until) + self._store.seconds
        return outputs, self.clock.time

    def batches(self, incarnation: str, seq: int) -> list[BlockBatch]:
        """Return the changes of its cache after this batch."""
        if (changes := self.engine.kv.news()) is not None:
            self._ledger.take(self.name, *changes)
        return self._ledger.after(incarnation, seq)

    def end_of(self, tokens: list[int]) -> Link | None:
        end = last_full(root_hash(SimRunner.layout), tokens, self.engine.config.block_size)
        return Link(*end) if end is not None else None

    @property
    def idle(self) -> bool:
        return self.engine.idle

    @property
    def tokens_left(self) -> int:
        """Number of tokens that all of its requests still have to compute until they end."""
        return sum(request.limit - request.computed for request in self.engine.scheduler.requests.values())

    def _move(self, now: float) -> None:
        """Transfer the blocks that the link to the store had time for until `now`; writes do not delay reads."""
        if self._tiers is None or self._store is None:
            return
        self._until = max(self._until, self.clock.time - 1.0)  # an idle link saves up one second of transfers at most
        while self._until + self._store.seconds <= now and self._tiers.read_next():
            self._until += self._store.seconds
        while self._tiers.write_next():
            pass


class Store:
    """The store that all workers share, and the seconds that reading a block takes."""

    def __init__(self, tier: Tier, seconds: float) -> None:
        self.tier = tier
        self.seconds = seconds


def _token(request: str, position: int) -> int:
    digest = blake2b(f"{request}:{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY
