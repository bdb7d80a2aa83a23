"""LatentPlanner: how the latent attention of one forward pass is split into work for a GPU.

Decode rows attend on the latents, and their keys are split into work items, as other attention does. Chunks of prompts
attend to their own tokens with the keys and values of each head, in tiles of queries. They attend to the
keys before the chunk on the latents if the step is captured, because the number of these keys is unknown then, or if
there are few new tokens. Otherwise keys and values of each head are computed for them too, in passes of bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from emberline.kernels import work_limits, worklist
from emberline.kernels.attention_plan import (
    DEFAULT_OPTIONS,
    AttentionPlan,
    AttentionPlanner,
    PlannerOptions,
    count_decode_keys,
    make_prefill_tiles,
    pad_tiles,
)
from emberline.kernels.latent_plan import ContextPass, LatentPlan, LatentScratch
from emberline.kernels.worklist import WorkList

if TYPE_CHECKING:
    from emberline.kernels.cuda import decode

CTAS_PER_SM = 2  # programs that an SM computes at the same time
MIN_EXPANDING_TOKENS = 256  # new tokens from which computing keys and values of cached tokens is faster
MAX_CAPTURED_PAIRS = 3 << 20  # pairs (new token, key before it) up to which a captured step is faster
MERGE_COST = 0.1  # time of merging one more part of a row, in tiles of keys


class LatentPlanner(AttentionPlanner):
    def __init__(
        self,
        heads: tuple[int, int, int],
        keys: Tensor,
        dtype: torch.dtype,
        max_rows: int,
        options: PlannerOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Prepare to plan forward passes, as AttentionPlanner does.

        Float8 latents are not copied as bf16, and fixed cuts are not supported.
        """
        assert not options.fixed_cuts and heads[1] == 1
        super().__init__(heads, keys, dtype, max_rows, replace(options, portable=True))
        self._plans: dict[tuple[int, int], tuple[np.ndarray, WorkList]] = {}  # with the planned lengths
        self._latent_scratch: LatentScratch | None = None
        if keys.is_cuda:
            results = work_limits.max_latent_places(max_rows, heads[0], self._sms) * options.max_queries * heads[0]
            self._latent_scratch = LatentScratch(
                torch.empty(results * heads[2], device=keys.device), torch.empty(results * 2, device=keys.device)
            )

    def can_capture_chunks(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Return whether a step with these prompt chunks is faster if it is captured into a CUDA graph.

        In a captured step, chunks must attend to earlier keys on the latents, which takes more operations. `chunks`:
        the numbers of cached and of new tokens of each chunk."""
        return sum(before * new for before, new in chunks) <= MAX_CAPTURED_PAIRS

    def limit_queries(self, max_queries: int) -> int:
        return max_queries

    def list_row_queries(self, max_queries: int) -> tuple[int, ...]:
        return (max_queries,)

    def plan(
        self,
        context: np.ndarray,
        new_token_counts: np.ndarray,
        decode_rows: int,
        to_device: Callable[[np.ndarray], Tensor],
        *,
        min_tiles: int = 0,
        logit_tokens: np.ndarray | None = None,
        max_queries: int = 1,
    ) -> AttentionPlan:
        """Return the plan of one forward pass, as AttentionPlanner does."""
        assert (new_token_counts[:decode_rows] <= max_queries).all(), "a decode row has too many new tokens"
        plan = AttentionPlan(decode_rows, max_queries)
        if self._device.type != "cuda":
            return plan
        decode_tokens = max(decode_rows, int(new_token_counts[:decode_rows].sum()))
        chunks = new_token_counts[decode_rows:]
        has_context = bool((context[decode_rows:][chunks > 0] > 0).any())
        passes: tuple[ContextPass, ...] = ()
        if not min_tiles and int(chunks[context[decode_rows:] > 0].sum()) >= MIN_EXPANDING_TOKENS:
            passes = tuple(
                ContextPass(to_device(sources), to_device(ranges))
                for sources, ranges in split_context(
                    context, new_token_counts, decode_rows, self._block, self._heads[0]
                )
            )
        on_latents = has_context and not passes
        limit = decode_tokens + int(chunks.sum()) if on_latents else decode_tokens
        limit_on_device = to_device(np.array([limit], np.int32))
        latent = LatentPlan(decode_tokens, on_latents or min_tiles > 0, limit_on_device, passes)
        plan = replace(plan, latent=latent, latent_scratch=self._latent_scratch)
        if len(chunks):
            tiles = make_prefill_tiles(context, new_token_counts, decode_rows)
            plan = replace(plan, prefill_tiles=to_device(pad_tiles(tiles, min_tiles)))
        if decode_rows:
            lengths = count_decode_keys(context[:decode_rows], new_token_counts[:decode_rows])
            plan = replace(plan, decode_work=self._plan_decode_rows(lengths, to_device, max_queries))
        return plan

    def scratch_buffers(self) -> list[Tensor]:
        scratch = self._latent_scratch
        return [] if scratch is None else [scratch.partials, scratch.max_and_sum]

    def max_plan_bytes(self, rows: int, tokens: int) -> int:
        if self._device.type != "cuda":
            return 0
        return 4 * worklist.num_data_ints(rows, self._item_capacity(rows)) + 2 * 8 * (rows + tokens) + 64

    def _plan_decode_rows(
        self, lengths: np.ndarray, to_device: Callable[[np.ndarray], Tensor], max_queries: int
    ) -> decode.DeviceWorkList:
        from emberline.kernels.cuda import decode

        rows = len(lengths)
        planned = -(-lengths // self._length_grain) * self._length_grain  # the kernel knows the actual lengths
        before = self._plans.get((rows, max_queries))
        if before is None or not np.array_equal(before[0], planned):
            programs = work_limits.count_latent_programs(max_queries * self._heads[0])
            capacity = self._item_capacity(rows)
            work = worklist.plan_decode_work(
                planned, programs, self._sms, capacity, ctas_per_sm=CTAS_PER_SM, merge_cost=MERGE_COST
            )
            before = self._plans[rows, max_queries] = planned, work
        return decode.DeviceWorkList(to_device(before[1].data), rows, before[1].capacity)

    def _item_capacity(self, rows: int) -> int:
        return work_limits.max_latent_items(rows, self._heads[0], self._sms)


def split_context(
    context: np.ndarray, new_token_counts: np.ndarray, first_row: int, block_size: int, heads: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the arrays `sources` and `ranges` of each ContextPass, in order.

    Together, the passes cover the cached keys of all rows from `first_row` on that have new tokens."""
    max_blocks = max(1, work_limits.MAX_EXPANDED_HEADS // (heads * block_size))
    keys = context * ((np.arange(len(context)) >= first_row) & (new_token_counts > 0))
    blocks = -(-keys // block_size)
    row = np.repeat(np.arange(len(keys)), blocks)
    index = np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    for begin in range(0, len(row), max_blocks):
        rows, indexes = row[begin : begin + max_blocks], index[begin : begin + max_blocks]
        ranges = np.zeros((len(keys), 3), np.int32)
        used, first, counts = np.unique(rows, return_index=True, return_counts=True)
        ranges[used, 0] = first * block_size
        ranges[used, 1] = np.minimum(counts * block_size, keys[used] - indexes[first] * block_size)
        ranges[used, 2] = indexes[first] > 0
        yield np.stack([rows, indexes], axis=1).astype(np.int32), ranges
