"""AttentionPlan: how the attention of one forward pass is split into work for a GPU.

The host makes the plan, because it knows the length of every row without waiting for the GPU. A row is one sequence of
the batch.

Rows [0, decode_rows) have one new token each, or up to `max_queries`; their work is split along the cached keys. The
remaining rows are chunks of prompts (prefill); their work is split along the queries, into tiles. On a CPU the plan is
empty, because the CPU kernels split the work themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from emberline.kernels import gpu_choice, work_limits, worklist
from emberline.kernels.cuda.driver import count_sms
from emberline.kernels.latent_plan import LatentPlan, LatentScratch
from emberline.kernels.worklist import TILE_KEYS, WorkList

if TYPE_CHECKING:
    from emberline.kernels.cuda import decode, prefill

MAX_LENGTH = 1 << 24  # keys of a row, by default
PREFILL_TILE_QUERIES = 128  # queries in a prefill tile

# Measured on an H200, per microsecond: bytes that the device reads, and floating-point operations of one SM.
READ_BYTES_PER_US, SM_FLOP_PER_US = 4.1e6, 5.2e6
DECODE_SM_DIVISOR, PREFILL_SM_DIVISOR = 6, 8  # decode gets at least one of 6 SMs, prefill at least one of 8
# Share of the combined time in which prefill should finish; share of prefill's time by which decode takes longer.
PREFILL_TIME_SHARE, DECODE_SLOWDOWN = 0.58, 0.65


@dataclass(slots=True)
class CacheTensorMaps:
    """TMA tensor maps (copy descriptors) of a KV cache, keyed by the address of a layer's keys."""

    decode: dict[int, decode.DecodeTensorMaps] = field(default_factory=dict)
    prefill: dict[int, prefill.PrefillTensorMaps] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WidenedBlocks:
    """Buffers for bf16 copies of float8 KV blocks, which all layers reuse one after the other."""

    keys: Tensor  # [blocks, heads, size, dim]
    values: Tensor
    sources: Tensor  # [blocks, 2] int32: row, and index in the row's block table
    count: Tensor  # [1] int32: number of sources
    first_blocks: Tensor  # [rows] int32: index of the first copy of a row
    block_numbers: Tensor  # [blocks] int32: 0 1 2 ..
    tables: Tensor | None = None  # [rows, blocks] int32: block tables of the copies

    def with_block_tables(self) -> WidenedBlocks:
        return replace(self, tables=self.first_blocks[:, None] + self.block_numbers)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    decode_rows: int  # number of rows with at most max_queries tokens each
    max_queries: int = 1  # selects the decode kernel, so a captured graph holds for one value only
    reads_early: bool = True  # whether decode may read old keys before the preceding kernel ends
    fixed_cuts: bool = False  # whether the keys of decode rows are cut at fixed positions
    decode_work: decode.DeviceWorkList | None = None  # work list of the decode rows
    decode_scratch: decode.DecodeScratch | None = None
    has_decode_kernel: bool = False  # whether the CUDA decode kernel supports the shapes; otherwise Triton computes all
    has_prefill_kernel: bool = False  # whether the CUDA prefill kernel does
    prefill_tiles: Tensor | None = None  # [n, 2] int32: row, and first query in its chunk
    logit_tiles: Tensor | None = None  # the prefill tiles that hold a query whose logits are needed; None: unknown
    unwidened_tiles: Tensor | None = None  # tiles of rows whose float8 blocks have no bf16 copy, for the Triton kernel
    prefill_sms: Tensor | None = None  # [1] int32: SMs for prefill; decode runs on the others at the same time
    prefill_counters: Tensor | None = None  # scratch of the prefill kernel
    widened: WidenedBlocks | None = None
    latent: LatentPlan | None = None  # of latent attention on a GPU
    latent_scratch: LatentScratch | None = None
    tensor_maps: CacheTensorMaps = field(default_factory=CacheTensorMaps)

    def for_last_layer(self) -> AttentionPlan:
        """Return the plan for the last layer, which computes only the queries whose logits are needed."""
        return self if self.logit_tiles is None else replace(self, prefill_tiles=self.logit_tiles)

    def with_block_tables(self) -> AttentionPlan:
        """Return this plan with block tables that point to the bf16 copies of the KV blocks.

        The device computes these tables once per forward pass.
        """
        return self if self.widened is None else replace(self, widened=self.widened.with_block_tables())


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    max_widened_blocks: int = 0  # float8 blocks that can be copied as bf16 for prefill in one forward pass
    max_queries: int = 1  # the largest `max_queries` of `AttentionPlanner.plan`; at most `worklist.max_row_queries`
    # Decode rows are planned for their length rounded up to a multiple of this: a larger one lets more consecutive
    # passes share a plan, which costs some balance between the multiprocessors.
    length_grain: int = TILE_KEYS
    fixed_cuts: bool = False  # whether the keys of a decode row are cut at fixed positions
    max_length: int = MAX_LENGTH  # keys of a decode row with fixed cuts
    portable: bool = False  # whether Triton kernels compute all attention, as they always do on latents


DEFAULT_OPTIONS = PlannerOptions()


class AttentionPlanner:
    def __init__(
        self,
        heads: tuple[int, int, int],
        keys: Tensor,
        dtype: torch.dtype,
        max_rows: int,
        options: PlannerOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Prepare to plan forward passes of at most `max_rows` sequences.

        `heads` is (query heads, KV heads, head size). `keys` is the key cache of all layers. `dtype` is the dtype of
        the activations.
        """
        self._fixed_cuts, self._max_length = options.fixed_cuts, options.max_length
        self._heads, self._device, self._key_bytes = heads, keys.device, keys.element_size()
        self._maps = CacheTensorMaps()
        self._has_decode_kernel = self._has_prefill_kernel = False
        self._scratch: decode.DecodeScratch | None = None
        self._counters: Tensor | None = None
        self._length_grain = options.length_grain
        self._work_lists: dict[tuple[int, int, bool], tuple[np.ndarray, WorkList]] = {}  # with the planned lengths
        self._widened: WidenedBlocks | None = None
        self._block = keys.shape[3]
        if keys.is_cuda:
            from emberline.kernels.cuda import decode, prefill

            has_kernels = dtype is torch.bfloat16 and not options.portable and gpu_choice.has_hopper_kernels()
            self._has_decode_kernel = has_kernels and decode.supports_shape(*heads, keys.dtype, keys.shape[3])
            self._has_prefill_kernel = has_kernels and prefill.supports_cache(keys[0])
            self._sms = count_sms(keys.device)
            self._counters = prefill.allocate_counters(keys.device)
            is_float8 = keys.dtype is torch.float8_e4m3fn
            widened = options.max_widened_blocks
            if widened and is_float8 and self._has_decode_kernel and prefill.supports_shape(*keys.shape[3:]):
                self._widened, self._has_prefill_kernel = _allocate_widened_blocks(keys, widened), True
            capacity = self._work_item_capacity(max_rows)
            if not options.portable:  # latents have scratch memory of their own
                queries = self.limit_queries(options.max_queries)
                self._scratch = decode.DecodeScratch(max_rows, capacity, *heads, keys.device, max_queries=queries)

    def limit_queries(self, max_queries: int) -> int:
        """Return how many queries a decode row may have: `max_queries`, or 1 with fixed cuts.

        With `PlannerOptions.fixed_cuts`, each query is a row, so several rows may belong to one sequence. Therefore the
        decode kernel reads no keys until the preceding kernel, which writes the new keys, has ended."""
        return 1 if self._fixed_cuts else max_queries

    def list_row_queries(self, max_queries: int) -> tuple[int, ...]:
        """Return, in ascending order, the values of `max_queries` for which `plan` uses different kernels.

        `max_queries`: the largest of these values."""
        q_heads, kv_heads, head_dim = self._heads
        return work_limits.list_row_queries(max_queries, q_heads // kv_heads, head_dim)

    def can_capture_chunks(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Return whether a step with these prompt chunks can be captured into a CUDA graph.

        `chunks`: the numbers of cached and of new tokens of each chunk."""
        return self.can_widen_blocks(before + new for before, new in chunks)

    def can_widen_blocks(self, lengths: Iterable[int]) -> bool:
        """Return whether bf16 copies of all KV blocks of sequences with these lengths fit into the buffers.

        The result is True if the cache is not float8, because no copies are needed then. If it is False, the slower
        Triton kernel computes some of the sequences.
        """
        if self._widened is None:
            return True
        return int(self._count_blocks(np.fromiter(lengths, np.int64)).sum()) <= len(self._widened.block_numbers)

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
        """Return the plan of one forward pass.

        `context` has the number of cached keys of each row, and `new_token_counts` its number of new tokens.
        Each decode row has at most `max_queries` new tokens, or none if it is padding; `worklist.split_decode_rows`
        splits sequences with more. `to_device` copies an array to the device. The shapes of tensors for decode rows
        depend only on `decode_rows`. Prefill tiles are padded to `min_tiles`. `logit_tokens` are the ascending indices
        of the new tokens whose logits are needed.
        """
        assert (new_token_counts[:decode_rows] <= max_queries).all(), "a decode row has too many new tokens"
        plan = AttentionPlan(
            *(decode_rows, max_queries, not self._fixed_cuts, self._fixed_cuts),
            prefill_counters=self._counters,
            tensor_maps=self._maps,
        )
        if self._device.type != "cuda":
            return plan
        plan = replace(plan, has_decode_kernel=self._has_decode_kernel, has_prefill_kernel=self._has_prefill_kernel)
        prefill_tiles, widened_counts = None, new_token_counts
        if decode_rows < len(new_token_counts):
            widened_counts = self._count_widened_tokens(context, new_token_counts, decode_rows)
            prefill_tiles = make_prefill_tiles(context, widened_counts, decode_rows)
        overlaps_prefill = prefill_tiles is not None and self._has_decode_kernel and self._has_prefill_kernel
        if decode_rows and overlaps_prefill and prefill_tiles is not None:
            read_bytes = int(context[:decode_rows].sum()) * 2 * self._heads[1] * self._heads[2] * self._key_bytes
            sms = choose_prefill_sms(prefill_tiles, context, new_token_counts, self._heads, read_bytes, self._sms)
            plan = replace(plan, prefill_sms=to_device(np.array([sms], np.int32)))
        if decode_rows:
            lengths = count_decode_keys(context[:decode_rows], new_token_counts[:decode_rows])
            work = self._plan_decode(lengths, to_device, max_queries, overlaps_prefill=overlaps_prefill)
            plan = replace(plan, decode_work=work, decode_scratch=self._scratch)
        if prefill_tiles is None:
            return plan
        widened = (
            None
            if self._widened is None
            else self._assign_widened_blocks(self._widened, context, widened_counts, to_device)
        )
        plan = replace(plan, prefill_tiles=to_device(pad_tiles(prefill_tiles, min_tiles)), widened=widened)
        if logit_tokens is not None:
            logit_tiles = select_tiles_with_tokens(prefill_tiles, new_token_counts, logit_tokens)
            plan = replace(plan, logit_tiles=to_device(logit_tiles))
        if not (unwidened := new_token_counts - widened_counts)[decode_rows:].any():
            return plan
        return replace(plan, unwidened_tiles=to_device(make_prefill_tiles(context, unwidened, decode_rows)))

    def _count_widened_tokens(
        self, context: np.ndarray, new_token_counts: np.ndarray, first_prefill_row: int
    ) -> np.ndarray:
        """Return for each row how many of its new tokens go into `AttentionPlan.prefill_tiles`: all or none.

        Decode rows have none. With a float8 cache, a row has none if the bf16 copies of its KV blocks, after those of
        the rows before it, do not fit into the buffers."""
        rows = np.arange(len(new_token_counts)) >= first_prefill_row
        if self._widened is not None:
            need = self._count_blocks(context + new_token_counts) * (rows & (new_token_counts > 0))
            rows &= np.cumsum(need) <= len(self._widened.block_numbers)
        return new_token_counts * rows

    def _count_blocks(self, key_counts: np.ndarray) -> np.ndarray:
        blocks: np.ndarray = -(-key_counts // self._block)
        return blocks

    def _assign_widened_blocks(
        self,
        buffers: WidenedBlocks,
        context: np.ndarray,
        token_counts: np.ndarray,
        to_device: Callable[[np.ndarray], Tensor],
    ) -> WidenedBlocks:
        need = (self._count_blocks(context + token_counts) * (token_counts > 0)).astype(np.int32)
        first_blocks = (np.cumsum(need) - need).astype(np.int32)
        sources = np.zeros((len(buffers.block_numbers), 2), np.int32)
        row = np.repeat(np.arange(len(need)), need)
        sources[: len(row), 0], sources[: len(row), 1] = row, np.arange(len(row)) - first_blocks[row]
        count = np.array([len(row)], np.int32)
        return replace(
            buffers, sources=to_device(sources), count=to_device(count), first_blocks=to_device(first_blocks)
        )

    def drop_tensor_maps(self) -> None:
        """Drop the cached tensor maps; call this before the KV cache moves to a different address."""
        self._maps.decode.clear()
        self._maps.prefill.clear()

    def scratch_buffers(self) -> list[Tensor]:
        """Return the scratch tensors that stay allocated between forward passes."""
        scratch, widened = self._scratch, self._widened
        kept = [] if scratch is None else [scratch.partials, scratch.max_and_sum, scratch.counters]
        return kept if widened is None else [*kept, widened.keys, widened.values]  # without the small block_numbers

    def max_plan_bytes(self, rows: int, tokens: int) -> int:
        """Return an upper bound of the bytes that `plan` copies to the device, for so many rows and new tokens."""
        if self._device.type != "cuda":
            return 0
        widened = 0 if self._widened is None else 8 * len(self._widened.block_numbers) + 4 * rows + 64
        return 4 * worklist.num_data_ints(rows, self._work_item_capacity(rows)) + 2 * 8 * (rows + tokens) + widened

    def _plan_decode(
        self,
        lengths: np.ndarray,
        to_device: Callable[[np.ndarray], Tensor],
        max_queries: int,
        *,
        overlaps_prefill: bool,
    ) -> decode.DeviceWorkList:
        from emberline.kernels.cuda import decode

        rows, (q_heads, kv_heads, head_dim) = len(lengths), self._heads
        planned = -(-lengths // self._length_grain) * self._length_grain  # the kernel knows the actual lengths
        key = rows, max_queries, overlaps_prefill
        before = self._work_lists.get(key)
        if before is None or not np.array_equal(before[0], planned):
            work = worklist.plan_decode_work(
                planned,
                kv_heads,
                self._sms,
                self._work_item_capacity(rows),
                overlaps_prefill=overlaps_prefill,
                ctas_per_sm=worklist.ctas_per_sm(q_heads // kv_heads, max_queries, head_dim),
                fixed_cuts=self._fixed_cuts,
            )
            before = self._work_lists[key] = planned, work
        return decode.DeviceWorkList(to_device(before[1].data), rows, before[1].capacity)

    def _work_item_capacity(self, rows: int) -> int:
        if self._fixed_cuts:
            return worklist.max_fixed_work_items(rows, self._max_length)
        return work_limits.max_work_items(rows, self._heads[1], self._sms)


def count_decode_keys(context: np.ndarray, new_token_counts: np.ndarray) -> np.ndarray:
    """Return the number of keys that each decode row reads, which is 0 for padding."""
    keys: np.ndarray = np.where(new_token_counts > 0, context + new_token_counts, 0)
    return keys


def choose_prefill_sms(
    tiles: np.ndarray,
    context: np.ndarray,
    new_token_counts: np.ndarray,
    heads: tuple[int, int, int],
    decode_bytes: int,
    num_sms: int,
) -> int:
    """Return the number of SMs for prefill while decode reads `decode_bytes` of keys and values.

    The result is all SMs if one prefill tile takes longer than decode needs to read these bytes. Otherwise it is chosen
    so that prefill ends when decode has read most of them. The two then overlap most of the time, which is fast because
    decode is limited by memory bandwidth and prefill by arithmetic.
    """
    if not len(tiles):
        return num_sms
    row, first = tiles[:, 0], tiles[:, 1]
    keys = context[row] + np.minimum(first + PREFILL_TILE_QUERIES, new_token_counts[row])
    tile = 4 * PREFILL_TILE_QUERIES * heads[2] / SM_FLOP_PER_US * keys
    prefill_us, read_us = heads[0] * float(tile.sum()), decode_bytes / READ_BYTES_PER_US
    if read_us < float(tile.mean()):
        return num_sms
    count = round(prefill_us / (PREFILL_TIME_SHARE * (read_us + DECODE_SLOWDOWN * prefill_us / num_sms)))
    return min(max(count, num_sms // PREFILL_SM_DIVISOR), num_sms - num_sms // DECODE_SM_DIVISOR)


def _allocate_widened_blocks(keys: Tensor, num_blocks: int) -> WidenedBlocks:
    shape, empty = (num_blocks, *keys.shape[2:]), torch.zeros(0, dtype=torch.int32, device=keys.device)
    k, v = (torch.zeros(shape, dtype=torch.bfloat16, device=keys.device) for _ in range(2))
    return WidenedBlocks(k, v, empty, empty, empty, torch.arange(num_blocks, dtype=torch.int32, device=keys.device))


def make_prefill_tiles(context: np.ndarray, token_counts: np.ndarray, first_row: int) -> np.ndarray:
    """Return the tiles of the rows from `first_row` on, those with the most keys first."""
    from emberline.kernels.cuda import prefill

    tiles = prefill.make_tiles(token_counts[first_row:], context[first_row:])
    shifted: np.ndarray = tiles + np.array([first_row, 0], tiles.dtype)
    return shifted


def select_tiles_with_tokens(tiles: np.ndarray, new_token_counts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the tiles that contain any of `tokens`: sorted indices into the new tokens of all rows."""
    ends = np.cumsum(new_token_counts)[tiles[:, 0]]
    begins = ends - new_token_counts[tiles[:, 0]] + tiles[:, 1]
    has_token = np.searchsorted(tokens, np.minimum(begins + PREFILL_TILE_QUERIES, ends)) > np.searchsorted(
        tokens, begins
    )
    selected: np.ndarray = tiles[has_token]
    return selected


def max_prefill_tiles(tokens: int, rows: int) -> int:
    """Return an upper bound of the prefill tiles of `rows` prompt chunks with `tokens` tokens in total."""
    return tokens // PREFILL_TILE_QUERIES + rows


def pad_tiles(tiles: np.ndarray, min_tiles: int) -> np.ndarray:
    padded: np.ndarray = np.concatenate([tiles, np.full((max(0, min_tiles - len(tiles)), 2), -1, tiles.dtype)])
    return padded
