"""SimWorker: a real Engine with a simulated GPU, which computes nothing and only advances a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from emberline.core.blockbatch import BlockBatch
from emberline.core.clock import ManualClock
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.block_event_log import BlockEventLog
from emberline.engine.engine import Engine
from emberline.kv.manager import KVManager
from emberline.kv.tiers.base import Tier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.router.prefix_block_map import BlockPosition
from emberline.sim.job import JobOutput, WorkerCounters, WorkerJob
from emberline.sim.link import KVLink, SimPulls
from emberline.sim.runners import SimRunner, make_sim_runner
from emberline.sim.worker_config import NEVER_S, SimWorkerConfig
from emberline.tokens.blockhash import hash_last_full_block, root_hash

if TYPE_CHECKING:
    from emberline.kv.pulls import PullManager

BLOCK_BUFFER_BYTES = 8  # size of a simulated block; its content does not matter
MAX_STAGED_BLOCKS = 512  # blocks between the cache and the store


@dataclass(slots=True)
class OpenJob:
    job: WorkerJob
    reply: list[int]  # all tokens of the reply
    num_generated: int = 0  # tokens that this worker has generated
    last_token_at: float = 0.0


class WorkProgress(NamedTuple):
    """The work that a worker has done since its start. A step counts when it ends, as in the stats of a real engine."""

    num_steps: int = 0
    busy_seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class SimWorker:
    def __init__(
        self,
        name: str,
        config: SimWorkerConfig,
        store: SimStore | None = None,
        link: KVLink | None = None,
        kv_bytes_per_token: float = 0.0,
    ) -> None:
        """`link`: the network link over which other workers' KV blocks are copied; None: they are computed again."""
        self.name = name
        self.clock = ManualClock()
        self._store = store
        self._tiers = None
        if store is not None:
            host = HostTier(BLOCK_BUFFER_BYTES, MAX_STAGED_BLOCKS * 4096, "lru")
            self._tiers = TierStack(host, [store.tier], clock=self.clock, threads=False)
        self._jobs: dict[str, OpenJob] = {}  # jobs by the id of the engine's request
        num_blocks = config.kv_tokens // config.block_size
        self._runner = make_sim_runner(num_blocks, config.cost, self.clock, self._token_at)
        self.engine = Engine(config.scheduler_config(), self._runner, self.clock, self._tiers)
        self._pulls: SimPulls | None = None
        if link is not None and isinstance(self.engine.kv, KVManager):
            self._pulls = SimPulls(self.clock, link, kv_bytes_per_token, config.block_size)
            self.engine.kv.pulls = cast("PullManager", self._pulls)
        self._block_events = BlockEventLog([name])
        self._store_link_free_at = 0.0
        self._run_end = 0.0
        self._progress = WorkProgress()
        self._outputs: list[Output] = []
        self._gaps: list[tuple[float, int]] = []

    def add(self, job: WorkerJob, now: float) -> None:
        request, reply = job.request, job.request.reply.tokens()
        params = SamplingParams(max_tokens=1 if job.prefill_only else request.reply.num_tokens, ignore_eos=True, seed=0)
        resumed = (tuple(reply[: job.num_resumed]),) if job.num_resumed else ()
        source = None
        if job.source is not None and self._pulls is not None:
            source = {"kv": job.source, "first_token": reply[0]}
        self._jobs[f"{job.id}#0"] = OpenJob(job, reply)
        self.clock.time = max(self.clock.time, now)
        self.engine.add(
            Submission(job.id, request.prompt_tokens(), params, timeout=NEVER_S, resumed=resumed, source=source),
            arrival=now,
        )

    def _token_at(self, request_id: str, position: int) -> int:
        open_job = self._jobs.get(request_id)
        # A job may have been removed while a step with it runs.
        return open_job.reply[position - open_job.job.request.num_prompt_tokens] if open_job is not None else 0

    def remove(self, job_id: str, now: float) -> int:
        self.engine.abort(job_id)
        self._runner.last_chunk_starts.pop(f"{job_id}#0", None)
        return self._jobs.pop(f"{job_id}#0").num_generated

    def start_run(self, now: float) -> float:
        self.clock.time = now
        self._transfer_blocks(now)
        self._outputs = self.engine.step()
        if self.clock.time == now and not self._outputs and self.engine.scheduler.num_loading:
            # Nothing to compute: wait for blocks of the store or of another worker.
            if self._store is not None:
                self.clock.time = max(now, self._store_link_free_at) + self._store.seconds_per_block
            elif self._pulls is not None and (end := self._pulls.next_end) is not None:
                self.clock.time = max(now, end)
        self._run_end = self.clock.time
        return self._run_end

    def shorten_run(self, now: float) -> float:
        return self._run_end  # a run is one step

    def finish_run(self) -> list[JobOutput]:
        self._progress = WorkProgress(
            self._runner.num_steps,
            self._runner.busy_seconds,
            self.engine.scheduler.prompt_tokens,
            self.engine.scheduler.generated_tokens,
        )
        outputs, self._outputs = self._outputs, []
        return [made for output in outputs if (made := self._make_output(output)) is not None]

    def _make_output(self, output: Output) -> JobOutput | None:
        request_id = f"{output.id}#0"
        if (open_job := self._jobs.get(request_id)) is None:
            return None  # it was removed
        assert output.error is None, output
        if output.tokens:
            if open_job.num_generated:
                self._gaps.append((self._run_end - open_job.last_token_at, 1))
            open_job.num_generated += len(output.tokens)
            open_job.last_token_at = self._run_end
        was_chunked = self._runner.last_chunk_starts.get(request_id, 0) > output.cached_tokens
        if output.finish is not None:
            del self._jobs[request_id]
            self._runner.last_chunk_starts.pop(request_id, None)
        timing = output.timing.prefill if output.timing is not None else None
        is_last = output.finish is not None
        return JobOutput(output.id, len(output.tokens), output.cached_tokens, is_last, timing or 0.0, was_chunked)

    def take_gaps(self) -> list[tuple[float, int]]:
        gaps, self._gaps = self._gaps, []
        return gaps

    def num_generated(self, job_id: str, now: float) -> int:
        return self._jobs[f"{job_id}#0"].num_generated

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
        return sum(request.max_len - request.num_computed for request in self.engine.scheduler.requests.values())

    def counters(self) -> WorkerCounters:
        scheduler, kv, progress = self.engine.scheduler, self.engine.kv, self._progress
        return WorkerCounters(
            len(scheduler.running),
            scheduler.num_waiting,
            scheduler.num_loading,
            progress.num_steps,
            1.0 - (kv.num_free_blocks + kv.num_cached_blocks) / kv.num_blocks,
            progress.busy_seconds,
            progress.prompt_tokens,
            progress.generated_tokens,
        )

    def check_invariants(self) -> None:
        self.engine.kv.check_invariants()

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
