"""SimWorker: a real Engine with a simulated GPU, which computes nothing and only advances a virtual clock."""

from __future__ import annotations

from emberline.core.blockbatch import BlockBatch
from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.events import Output
from emberline.core.request import Submission
from emberline.engine.block_event_log import BlockEventLog
from emberline.engine.engine import Engine
from emberline.kv.tiers.base import Tier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.router.prefix_block_map import BlockPosition
from emberline.sim.costmodel import StepCosts
from emberline.sim.runners import SimRunner, make_sim_runner
from emberline.tokens.blockhash import hash_last_full_block, root_hash

BLOCK_BUFFER_BYTES = 8  # size of a simulated block; its content does not matter
MAX_STAGED_BLOCKS = 512  # blocks between the cache and the store


class SimWorker:
    def __init__(
        self, name: str, config: SchedulerConfig, kv_tokens: int, cost: StepCosts, store: SimStore | None
    ) -> None:
        self.name = name
        self.clock = ManualClock()
        self.is_stepping = False  # the end of its step is a scheduled event
        self._store = store
        self._tiers = None
        if store is not None:
            host = HostTier(BLOCK_BUFFER_BYTES, MAX_STAGED_BLOCKS * 4096, "lru")
            self._tiers = TierStack(host, [store.tier], clock=self.clock, threads=False)
        runner = make_sim_runner(kv_tokens // config.block_size, cost, self.clock)
        self.engine = Engine(config, runner, self.clock, self._tiers)
        self._block_events = BlockEventLog([name])
        self._store_link_free_at = 0.0

    def add_submission(self, submission: Submission, now: float) -> None:
        self.engine.add(submission, arrival=now)

    def step(self, now: float) -> tuple[list[Output], float]:
        """Run a step that begins at `now`. Return the outputs of the step and the virtual time at which it ends."""
        self.clock.time = now
        self._transfer_blocks(now)
        outputs = self.engine.step()
        loading = self.engine.scheduler.num_loading
        if (
            self.clock.time == now and loading and self._store is not None
        ):  # nothing to compute: wait for blocks of the store
            self.clock.time = max(now, self._store_link_free_at) + self._store.seconds_per_block
        return outputs, self.clock.time

    def batches_after(self, incarnation: str, batch_number: int) -> list[BlockBatch]:
        """Return the batches of KV events that follow the batch with this number."""
        if (changes := self.engine.kv.take_prefix_changes()) is not None:
            self._block_events.record(self.name, *changes)
        return self._block_events.batches_after(incarnation, batch_number)

    def last_prompt_block(self, tokens: list[int]) -> BlockPosition | None:
        end = hash_last_full_block(root_hash(SimRunner.layout), tokens, self.engine.config.block_size)
        return BlockPosition(*end) if end is not None else None

    @property
    def is_idle(self) -> bool:
        return self.engine.idle

    @property
    def remaining_tokens(self) -> int:
        """The number of tokens, prompt and output, that all open requests of this worker still have to compute."""
        return sum(request.max_len - request.num_computed for request in self.engine.scheduler.requests.values())

    def _transfer_blocks(self, now: float) -> None:
        """Simulate the transfers between the worker and the shared store up to the time `now`.

        As many blocks are read as the link to the store could transfer until then. All waiting blocks are written,
        because writes take no time in the simulation."""
        if self._tiers is None or self._store is None:
            return
        # An idle link saves up one second of transfers at most.
        self._store_link_free_at = max(self._store_link_free_at, self.clock.time - 1.0)
        while self._store_link_free_at + self._store.seconds_per_block <= now and self._tiers.load_next_block():
            self._store_link_free_at += self._store.seconds_per_block
        while self._tiers.write_next_block():
            pass


class SimStore:
    """The KV store that all simulated workers share, and the seconds that reading one block from it takes."""

    def __init__(self, tier: Tier, seconds: float) -> None:
        self.tier = tier
        self.seconds_per_block = seconds
