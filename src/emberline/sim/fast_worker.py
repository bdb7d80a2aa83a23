"""FastWorker: a simulated worker that computes the time of many decode steps at once, for fleets of 1,000 workers.

It follows the schedule of the engine: every step decodes one token of each running request, and fills the rest of its
token budget with prompts, in the order of arrival. While no request arrives, ends or needs memory, all steps are equal
except for the growing contexts, so their total time is computed at once. Two things are simplified: the KV cache holds
segments of prompts, such as messages, instead of blocks (`prefix_cache`), and step times grow linearly within a run."""

from __future__ import annotations

import heapq
import itertools
from collections import deque

from emberline.core.step_costs import count_prompt_pairs
from emberline.sim.fast_run import FastJob, FastRun
from emberline.sim.job import JobOutput, WorkerCounters, WorkerJob
from emberline.sim.link import KVLink
from emberline.sim.prefix_cache import SimPrefixCache
from emberline.sim.worker_config import SimWorkerConfig


class FastWorker:
    def __init__(self, name: str, config: SimWorkerConfig, link: KVLink | None, kv_bytes_per_token: float) -> None:
        self.name = name
        self._config = config
        self._cost = config.cost
        self._link = link
        self._kv_bytes_per_token = kv_bytes_per_token
        self._cache = SimPrefixCache(config.kv_tokens, config.block_size)
        self._jobs: dict[str, FastJob] = {}
        self._waiting: deque[FastJob] = deque()
        self._loading: list[FastJob] = []
        self._prefilling: list[FastJob] = []
        self._decoding: list[tuple[int, int, FastJob]] = []  # a heap, by their last step; removed ones stay in it
        self._numbers = itertools.count()
        self._num_rows = 0  # decoding requests
        self._context = 0  # tokens that their next step reads
        self._sum_last_steps = 0
        self._num_steps = 0
        self._run: FastRun | None = None
        self._outputs: list[JobOutput] = []
        self._gaps: list[tuple[float, int]] = []
        self._has_removed = False
        self._link_free_at = 0.0
        self._busy_seconds = 0.0
        self._prompt_tokens = self._generated_tokens = 0

    # -- jobs ------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    @property
    def num_running(self) -> int:
        return self._num_rows + len(self._prefilling) + len(self._loading)

    def add(self, job: WorkerJob, now: float) -> None:
        first_step = self._num_steps
        if self._cost.plans_ahead and self._run is not None and self._run.chunks:
            first_step += 2  # the step after this one is planned already
        state = FastJob(job, now, first_step, job.num_known, job.num_left)
        self._jobs[job.id] = state
        self._waiting.append(state)

    def remove(self, job_id: str, now: float) -> int:
        state = self._jobs.pop(job_id)
        num_generated = self._count_generated(state, now)
        if (run := self._run) is not None and state.joined_step is not None:
            run.num_left_rows += 1
            if steps := num_generated - (state.num_before + 1 + self._num_steps - state.joined_step):
                self._gaps.append((run.seconds(steps) / steps, steps))
        state.is_removed = self._has_removed = True
        if state in self._waiting:
            self._waiting.remove(state)
        elif self._run is None:
            self._drop_removed(now)
        return num_generated

    def num_generated(self, job_id: str, now: float) -> int:
        return self._count_generated(self._jobs[job_id], now)

    def _count_generated(self, state: FastJob, now: float) -> int:
        if state.joined_step is None:
            return state.num_before
        done = 0
        if (run := self._run) is not None and run.num_steps > 1:
            done = run.steps_until(now - run.start)
            done -= run.seconds(done) > now - run.start
        return state.num_before + 1 + self._num_steps + done - state.joined_step

    @property
    def remaining_tokens(self) -> int:
        others = itertools.chain(self._waiting, self._loading, self._prefilling)
        decoding = self._sum_last_steps - self._num_rows * self._num_steps
        return decoding + sum(state.num_known - state.num_computed + state.num_left for state in others)

    def counters(self) -> WorkerCounters:
        held = self._context + sum(state.num_known for state in itertools.chain(self._loading, self._prefilling))
        return WorkerCounters(
            self.num_running,
            len(self._waiting),
            len(self._loading),
            self._num_steps,
            min(1.0, held / self._config.kv_tokens),
            self._busy_seconds,
            self._prompt_tokens,
            self._generated_tokens,
        )

    def take_gaps(self) -> list[tuple[float, int]]:
        gaps, self._gaps = self._gaps, []
        return gaps

    def check_invariants(self) -> None:
        if self.is_idle and self._run is None:
            assert not (self._waiting or self._loading or self._prefilling)
            assert self._num_rows == self._context == self._sum_last_steps == 0
            self._cache.check_no_segment_is_held()

    # -- runs --------------------------------------------------------------------------------------------------------

    def start_run(self, now: float) -> float:
        run = self._run = FastRun(now, end=now)
        if self._start_loaded_jobs(now):
            return now
        budget = self._config.batch_tokens - self._num_rows
        for state in self._prefilling:
            if budget <= 0:
                break
            budget -= self._add_chunk(run, state, budget)
        while budget > 0 and (admitted := self._admit_next(now)) is not None:
            if admitted.ready_at is None:
                budget -= self._add_chunk(run, admitted, budget)
        if self._start_loaded_jobs(now):  # blocks that were copied before the admission
            run.chunks.clear()
            return now
        if run.chunks:
            prompt_tokens = sum(count for _, count in run.chunks)
            pairs = sum(count_prompt_pairs(state.num_computed, count) for state, count in run.chunks)
            run.num_steps = 1
            run.end = now + self._cost.step_seconds(self._num_rows, self._context, prompt_tokens, pairs)
        elif self._num_rows:
            self._plan_decode_run(run)
        elif self._loading:
            run.end = max(now, min(state.ready_at or 0.0 for state in self._loading))
        return run.end

    def _plan_decode_run(self, run: FastRun) -> None:
        num_steps = self._decoding[0][0] - self._num_steps
        if self._waiting and (first := self._waiting[0].first_step) > self._num_steps:
            num_steps = min(num_steps, first - self._num_steps)
        while not self._cache.make_room(self._num_rows * num_steps):
            if (fitting := self._cache.num_free // self._num_rows) > 0:
                num_steps = min(num_steps, fitting)
            else:
                self._preempt_last(run.start)
        # Step times are assumed to grow linearly with the context.
        rows, context = self._num_rows, self._context
        run.first_s = last_s = self._cost.step_seconds(rows, context)
        if num_steps > 1:
            last_s = self._cost.step_seconds(rows, context + rows * (num_steps - 1))
            run.growth_s = max(0.0, last_s - run.first_s) / (num_steps - 1)
        if self._loading:
            num_steps = min(num_steps, run.steps_until(min(s.ready_at or 0.0 for s in self._loading) - run.start))
        run.num_steps = num_steps
        run.end = run.start + run.seconds(num_steps)

    def shorten_run(self, now: float) -> float:
        run = self._run
        assert run is not None
        if not run.num_steps:
            run.end = max(now, run.start)
        elif not run.chunks:
            steps = run.steps_until(now - run.start) + self._cost.plans_ahead
            if steps < run.num_steps:
                run.num_steps, run.end = steps, run.start + run.seconds(steps)
        return run.end

    def finish_run(self) -> list[JobOutput]:
        run = self._run
        assert run is not None
        self._run = None
        if run.num_steps:
            self._finish_steps(run)
        if self._has_removed:
            self._drop_removed(run.end)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _finish_steps(self, run: FastRun) -> None:
        seconds, num_tokens = run.end - run.start, self._num_rows * run.num_steps
        self._busy_seconds += seconds
        self._num_steps += run.num_steps
        self._context += num_tokens
        self._generated_tokens += num_tokens
        self._cache.num_used += num_tokens
        if num_left := num_tokens - run.num_left_rows * run.num_steps:
            self._gaps.append((seconds / run.num_steps, num_left))
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            _, _, state = heapq.heappop(self._decoding)
            if state.joined_step is not None and state.last_step <= self._num_steps:
                self._stop_decoding(state)
                self._finish_job(state, run.end)
        for state, count in run.chunks:
            state.was_chunked = state.num_computed > state.num_cached
            state.num_computed += count
            self._prompt_tokens += count
            self._share_prompt(state, run.end)
            if state.num_computed >= state.num_known and not state.is_removed:
                self._prefilling.remove(state)
                self._start_decoding(state, run.end)

    # -- the way of a job ------------------------------------------------------------------------------------------

    def _admit_next(self, now: float) -> FastJob | None:
        """Start the first waiting job and return it; None if it cannot start now."""
        if not self._waiting or self.num_running >= self._config.max_running:
            return None
        state = self._waiting[0]
        if state.first_step > self._num_steps and self._num_rows + len(self._prefilling) > 0:
            return None
        segment, cached = self._cache.hold_prefix(state.job.request)
        block = self._config.block_size
        cached = min(cached, state.num_known - 1) // block * block
        needed = state.num_known - cached
        if not self._cache.make_room(needed + block * (self.num_running + 1)):
            self._cache.release(segment, segment.last_used if segment is not None else now)
            return None
        self._waiting.popleft()
        self._cache.allocate(needed)
        state.held, state.num_private, state.num_computed, state.admitted_at = segment, needed, cached, now
        if state.last_token_at is None:
            state.num_cached = cached
        source, state.ready_at = state.job.source, None
        is_copied = source is not None and state.last_token_at is None and cached + block <= source.tokens
        if is_copied and source is not None and self._link is not None:
            seconds = source.seconds(self._link, self._kv_bytes_per_token, source.tokens // block * block - cached)
            self._link_free_at = state.ready_at = source.copy_end(self._link_free_at, now, seconds)
            self._loading.append(state)
        else:
            self._prefilling.append(state)
        return state

    def _start_loaded_jobs(self, now: float) -> bool:
        """Continue the jobs whose KV blocks have been copied, and return whether a job has new output tokens."""
        ready = [state for state in self._loading if state.ready_at is not None and state.ready_at <= now]
        for state in ready:
            self._loading.remove(state)
            assert state.job.source is not None
            if state.job.source.is_prefill:
                state.num_cached, state.num_computed = state.job.source.cached_tokens, state.num_known
                self._share_prompt(state, now)
                self._start_decoding(state, now)
            else:
                state.num_computed = state.num_known - 1
                self._prefilling.append(state)
        return bool(self._outputs)

    def _add_chunk(self, run: FastRun, state: FastJob, budget: int) -> int:
        count = min(budget, state.num_known - state.num_computed)
        run.chunks.append((state, count))
        return count

    def _share_prompt(self, state: FastJob, now: float) -> None:
        """Let other requests share the computed part of a job's prompt."""
        request = state.job.request
        num_computed = min(state.num_computed, request.num_prompt_tokens)
        state.held, shared = self._cache.add_prompt(request, state.held, num_computed, now)
        state.num_private -= min(shared, state.num_private)

    def _start_decoding(self, state: FastJob, now: float) -> None:
        """Output the first token of a job whose prompt is computed, and start to decode its other tokens."""
        state.num_computed = state.num_known
        self._generated_tokens += 1
        if state.last_token_at is not None:
            self._gaps.append((now - state.last_token_at, 1))
        is_last = state.num_left == 1
        prefill_s = now - state.admitted_at
        self._outputs.append(JobOutput(state.job.id, 1, state.num_cached, is_last, prefill_s, state.was_chunked))
        state.joined_step, state.last_step = self._num_steps, self._num_steps + state.num_left - 1
        if is_last:
            self._end_job(state, now)
            return
        self._num_rows += 1
        self._context += state.context(self._num_steps)
        self._sum_last_steps += state.last_step
        heapq.heappush(self._decoding, (state.last_step, next(self._numbers), state))

    def _stop_decoding(self, state: FastJob) -> None:
        assert state.joined_step is not None
        self._num_rows -= 1
        self._context -= state.context(self._num_steps)
        self._sum_last_steps -= state.last_step
        state.num_private += self._num_steps - state.joined_step

    def _finish_job(self, state: FastJob, now: float) -> None:
        assert state.joined_step is not None
        if not state.is_removed:
            self._outputs.append(JobOutput(state.job.id, self._num_steps - state.joined_step, is_last=True))
        self._end_job(state, now)

    def _end_job(self, state: FastJob, now: float) -> None:
        """Release the KV cache of a job. The computed part of its prompt stays cached until it is evicted.

        The output, except its last token, stays cached too if the job has generated the whole reply."""
        assert state.joined_step is not None
        num_output = state.num_before + self._num_steps - state.joined_step
        is_whole_reply = not state.is_removed and not state.job.prefill_only
        if is_whole_reply:
            num_output += state.job.num_resumed
            shared = self._cache.add_reply(state.job.request, state.held, min(num_output, state.num_private))
            state.num_private -= shared
        self._cache.num_used -= state.num_private
        self._cache.release(state.held, now)
        state.joined_step = None
        self._jobs.pop(state.job.id, None)

    def _preempt_last(self, now: float) -> None:
        """Preempt the decoding job that arrived last: free its memory; its tokens are computed again later."""
        state = max((each for _, _, each in self._decoding if each.joined_step is not None), key=lambda s: s.arrival)
        assert state.joined_step is not None
        num_generated = 1 + self._num_steps - state.joined_step
        self._stop_decoding(state)
        self._cache.num_used -= state.num_private
        self._cache.release(state.held, now)
        self._decoding = [entry for entry in self._decoding if entry[2] is not state]
        heapq.heapify(self._decoding)
        state.num_before += num_generated
        state.num_known += num_generated
        state.num_left -= num_generated
        state.num_private = state.num_computed = 0
        state.held, state.joined_step, state.last_token_at = None, None, now
        self._waiting.appendleft(state)

    def _drop_removed(self, now: float) -> None:
        self._has_removed = False
        for state in [each for _, _, each in self._decoding if each.is_removed and each.joined_step is not None]:
            self._stop_decoding(state)
            self._end_job(state, now)
        self._decoding = [entry for entry in self._decoding if not entry[2].is_removed]
        heapq.heapify(self._decoding)
        for group in (self._prefilling, self._loading):
            for state in [each for each in group if each.is_removed]:
                group.remove(state)
                self._cache.num_used -= state.num_private
                self._cache.release(state.held, now)
