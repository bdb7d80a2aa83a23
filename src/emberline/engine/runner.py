"""TorchRunner: computes StepPlans on the CPU with a decoder and a paged KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from emberline.core.errors import ModelError
from emberline.core.plan import StepPlan, StepResult, TokenLogprob, WorkItem
from emberline.engine.kv_shape import make_kv_shape
from emberline.engine.sampler import Sampler, SamplingStateFactory, split_logit_rows
from emberline.engine.speculation.draft_runner import DraftRunner
from emberline.engine.work_executor import StepExecutor, WorkExecutor
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.state_pages import StatePages
from emberline.kv.transfer.shm import SharedSegment
from emberline.models.decoder import DecoderModel

if TYPE_CHECKING:
    from emberline.engine.grammar import GrammarCompiler


class TorchRunner:
    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        eos: frozenset[int],
        make_compiler: Callable[[], GrammarCompiler] | None = None,
        draft_runner: DraftRunner | None = None,
        groups: LayerGroups | None = None,
        states: StateCache | None = None,
        executor: StepExecutor | None = None,
    ) -> None:
        """`draft_runner`: proposes tokens for speculative decoding; None: there is no draft model.

        `groups`: layers that share block tables; None: all share one. `states`: memory of recurrent layers, if any.
        `executor`: computes the steps; None: this process alone does, with the model."""
        self.model = model
        self.cache = cache
        self.num_blocks = cache.num_blocks
        self.groups = groups or LayerGroups.single(model.config.layers)
        self.states = states
        self.num_state_slots = 0 if states is None else states.num_slots
        self.vocab_size = model.config.vocab
        self.eos = eos
        self.layout = "/".join(
            filter(None, (model.fingerprint, str(cache.shape.dtype), str(cache.shape.block_size), self.groups.name))
        )
        rows = SamplingStateFactory(eos, make_compiler)
        self.prepare = rows.prepare
        self._sampler = Sampler(self.vocab_size, rows)
        self._executor = executor or WorkExecutor(model, cache, self.groups, states)
        self.pages_per_slot = 0
        if states is not None:
            self.pages_per_slot = StatePages.for_slots(states.shape.slot_bytes, cache.shape.block_bytes, 0).per_slot
        self._draft_runner = draft_runner

    def free_caches(self) -> None:
        """Give the memory of KV caches and states back to the system. No request may be open."""
        self.cache.free_pages()
        if self.states is not None:
            self.states.free_pages()
        if self._draft_runner is not None:
            self._draft_runner.free_cache()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._executor.copy(plan.saves, plan.loads)
        self._executor.clear([block for w in plan.work for block in w.cleared_blocks])
        self._forget_requests(plan.ended_ids)
        work, failed = self._admit_requests(plan)
        return self._compute_step(plan, work, failed, began)

    def _forget_requests(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self._sampler.forget(request_id)
            if self._draft_runner is not None:
                self._draft_runner.forget(request_id)

    def _admit_requests(self, plan: StepPlan) -> tuple[list[WorkItem], dict[str, str]]:
        """Return the work of requests that can be sampled, and by id why others cannot."""
        failed = {a.id: why for a in plan.admitted if (why := self._sampler.admit(a)) is not None}
        return [w for w in plan.work if w.id not in failed], failed

    def _compute_step(self, plan: StepPlan, work: list[WorkItem], failed: dict[str, str], began: float) -> StepResult:
        """Compute and sample the work of a plan. `began`: time on the performance counter, for the result."""
        if not work:
            return StepResult(plan.step, {}, failed=failed)
        draft_runner = self._draft_runner if plan.runs_draft_model else None
        if self._draft_runner is not None:
            self._draft_runner.note_work(work)
        capture = None if draft_runner is None else draft_runner.make_capture(plan)
        logits = self._executor.compute(work, capture)
        prompt_logprobs, logits = self._score_prompts(work, logits)
        sampled, lost = self._sampler.sample([w for w in work if w.samples], logits) if len(logits) else ({}, {})
        forced = self._sampler.forced_tokens(sampled) if plan.reports_forced else {}
        drafted = {} if draft_runner is None else draft_runner.propose(work, sampled, capture, self._sampler.tokens_of)
        seconds = time.perf_counter() - began
        return StepResult(plan.step, sampled, prompt_logprobs, failed | lost, seconds, forced, drafted)

    def _score_prompts(
        self, work: list[WorkItem], logits: torch.Tensor
    ) -> tuple[dict[str, list[TokenLogprob]], torch.Tensor]:
        """Return the log-probabilities of each prompt by request id, and the rows of the logits to sample from."""
        if not any(w.prompt_logprobs for w in work):
            return {}, logits
        scored, sampled = split_logit_rows(work)
        scores = {w.id: self._sampler.prompt_logprobs(w.id, w.start, logits[rows]) for w, rows in scored}
        return scores, logits[sampled]


def allocate_cache(
    model: DecoderModel,
    *,
    dtype: torch.dtype,
    block_size: int,
    memory_bytes: int,
    max_tokens: int,
    groups: LayerGroups | None = None,
    uses_shared_memory: bool = False,
) -> KVCache:
    """Allocate a KV cache of at most `memory_bytes`, with blocks for at most `max_tokens` tokens.

    `groups`: which layers share block tables; None: all share one. `uses_shared_memory`: allocate it where other
    processes can read the blocks. Raises ModelError if `memory_bytes` is too small."""
    groups = groups or LayerGroups.single(model.config.layers)
    shape = make_kv_shape(model.config, block_size, dtype, groups)
    blocks = min(memory_bytes // shape.block_bytes, -(-max_tokens // block_size) * len(groups.windows))
    if blocks < (least := 2 * len(groups.windows)):
        raise ModelError(
            f"the KV cache has {memory_bytes} bytes, enough for {blocks} blocks of {shape.block_bytes} bytes; "
            f"at least {least} blocks are needed",
            hint="raise --kv-memory",
        )
    layout = shape.layout(model.fingerprint, groups=groups.name)
    return KVCache(shape, blocks, segment=SharedSegment(layout, blocks) if uses_shared_memory else None)
