"""AttentionPlan: how a step's attention is split into work for a GPU. The host makes it, since it has all lengths.

Rows [0, decode_rows) have one token each and are split along their keys. The others are chunks of prompts (prefill) and
are split along their queries into tiles. On a CPU the kernels split the work themselves, and the plan is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from emberline.kernels.cuda import decode, prefill

CHUNK_ROWS = 128  # queries in a prefill tile
GATED_ROWS = 16  # gate rows that alternate with as many up rows, so that a kernel computes both factors of an output

# Measured on an H200, per microsecond: bytes that the device reads, and floating-point operations of one SM.
READ, MULTIPLY = 4.1e6, 5.2e6
LEFT, LEAST = 6, 8  # decode gets at least one of 6 SMs, prefill at least one of 8
# Share of the combined time in which prefill should finish; share of prefill's time by which decode takes longer.
MOST_OF, HINDERED = 0.58, 0.65


@dataclass(slots=True)
class Maps:
    """TMA tensor maps of one runner's KV cache, by the address of a layer's keys."""

    decode: dict[int, decode.LayerCache] = field(default_factory=dict)
    prefill: dict[int, prefill.PagedCache] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Widened:
    """bf16 copies of the float8 KV blocks of prefill rows, one layer at a time."""

    keys: Tensor  # [blocks, heads, size, dim]
    values: Tensor
    pieces: Tensor  # [blocks, 2] int32: row, and index in the row's block table
    count: Tensor  # [1] int32: number of sources
    bases: Tensor  # [rows] int32: index of the first copy of a row
    steps: Tensor  # [blocks] int32: 0 1 2 ..
    tables: Tensor | None = None  # [rows, blocks] int32: block tables of the copies

    def laid(self) -> Widened:
        return replace(self, tables=self.bases[:, None] + self.steps)


@dataclass(frozen=True, slots=True)
class Tiles:
    singles: int  # number of rows with one token each
    work: decode.Work | None = None  # work list of the decode rows
    scratch: decode.Scratch | None = None
    chunks: Tensor | None = None  # [n, 2] int32: row, and first query in its chunk
    sought: Tensor | None = None  # the prefill tiles that hold a query whose logits are needed; None: unknown
    general: Tensor | None = None  # tiles for the Triton kernel, where the CUDA kernels do not support the shape
    queries: int = 0  # queries in one of these tiles
    chunk_sms: Tensor | None = None  # [1] int32: SMs for prefill; decode runs on the others at the same time
    counters: Tensor | None = None  # scratch of the prefill kernel
    widened: Widened | None = None
    maps: Maps = field(default_factory=Maps)

    def last(self) -> Tiles:
        """Return the plan for the last layer, after which only queries whose logits are needed matter."""
        return self if self.sought is None else replace(self, chunks=self.sought)

    def laid(self) -> Tiles:
        """Return the plan with the block tables of widened copies, computed on the device once per step."""
        return self if self.widened is None else replace(self, widened=self.widened.laid())


class Cutter:
    def __init__(
        self, heads: tuple[int, int, int], keys: Tensor, dtype: torch.dtype, rows: int, *, widened: int = 0
    ) -> None:
        """Prepare plans for steps of at most `max_rows` rows.

        `heads`: query heads, KV heads, head size. `keys`: the key cache. `dtype`: of activations.
        `max_widened_blocks`: float8 blocks of all prefill rows of a step that can be copied as bf16.
        """
        self._heads, self._device, self._key_bytes = heads, keys.device, keys.element_size()
        self._maps = Maps()
        self._has_decode_kernel = self._has_prefill_kernel = False
        self._scratch: decode.Scratch | None = None
        self._counters: Tensor | None = None
        self._widened: Widened | None = None
        self._block = keys.shape[3]
        if keys.is_cuda:
            from emberline.kernels.cuda import decode, prefill

            is_bf16 = dtype is torch.bfloat16
            self._has_decode_kernel = is_bf16 and decode.supports(*heads, keys.dtype, keys.shape[3])
            self._has_prefill_kernel = is_bf16 and prefill.supports(keys[0])
            self._sms = decode.multiprocessors(keys.device)
            self._counters = prefill.new_counters(keys.device)
            is_float8 = keys.dtype is torch.float8_e4m3fn
            if widened and is_float8 and self._has_decode_kernel and prefill.serves(*keys.shape[3:]):
                self._widened, self._has_prefill_kernel = _allocate_widened(keys, widened), True
            if self._has_decode_kernel:
                self._scratch = decode.Scratch(rows, self._capacity(rows), *heads, keys.device)

    @property
    def fixed(self) -> bool:
        """Whether plans can have shapes that do not depend on the lengths, as a CUDA graph needs."""
        return self._device.type != "cuda" or (self._has_decode_kernel and self._has_prefill_kernel)

    def fits(self, lengths: Iterable[int]) -> bool:
        """Return whether prefill rows of so many keys can be copied as bf16, if the cache needs it.

        If not, some rows go to the slower Triton kernel, and the plan has other tensors.
        """
        if self._widened is None:
            return True
        return int(self._count_blocks(np.fromiter(lengths, np.int64)).sum()) <= len(self._widened.steps)

    def cut(
        self,
        context: np.ndarray,
        counts: np.ndarray,
        singles: int,
        put: Callable[[np.ndarray], Tensor],
        *,
        most: int = 0,
        sought: np.ndarray | None = None,
    ) -> Tiles:
        """Return the plan of a step.

        `context`: keys before each row's first new token. `counts`: new tokens of each row. `to_device` copies an array
        to the device. Tensors for decode rows have shapes that depend on `decode_rows` only; prefill tiles are padded
        to `min_tiles`. `logit_tokens`: the tokens whose logits are needed, in ascending order.
        """
        tiles = Tiles(singles, counters=self._counters, maps=self._maps)
        if self._device.type != "cuda":
            return tiles
        first_prefill = singles if self._has_decode_kernel else 0  # the prefill kernels support single tokens too
        has_prefill, cut = first_prefill < len(counts), None
        fast = self._count_fast_tokens(context, counts, first_prefill) if has_prefill else counts
        if has_prefill and self._has_prefill_kernel:
            from emberline.kernels.cuda import prefill

            cut = _shift_rows(prefill.tiles(fast[first_prefill:], context[first_prefill:]), first_prefill)
        if first_prefill and cut is not None:
            read_bytes = int(context[:first_prefill].sum()) * 2 * self._heads[1] * self._heads[2] * self._key_bytes
            sms = sms_for_chunks(cut, context, counts, self._heads, read_bytes, self._sms)
            tiles = replace(tiles, chunk_sms=put(np.array([sms], np.int32)))
        if first_prefill:
            lengths = (context[:first_prefill] + 1) * counts[:first_prefill]
            work = self._plan_decode(lengths, put, beside=cut is not None)
            tiles = replace(tiles, work=work, scratch=self._scratch)
        if cut is not None:
            widened = None if self._widened is None else self._place_widened(self._widened, context, fast, put)
            tiles = replace(tiles, chunks=put(_pad(cut, most)), widened=widened)
            tiles = tiles if sought is None else replace(tiles, sought=put(holding(cut, counts, sought)))
        if not has_prefill or not (slow := (counts - fast)[first_prefill:]).any():
            return tiles
        from emberline.kernels.triton import attention

        queries = attention.tile_queries(int(slow.max()), self._heads[0] // self._heads[1])
        general = _shift_rows(attention.make_tiles(slow, queries), first_prefill)
        return replace(tiles, general=put(general), queries=queries)

    def _count_fast_tokens(self, context: np.ndarray, counts: np.ndarray, first_prefill: int) -> np.ndarray:
        """Return how many tokens of each row the CUDA prefill kernel computes: all of them or none."""
        taken = (np.arange(len(counts)) >= first_prefill) & self._has_prefill_kernel
        if self._widened is not None:
            need = self._count_blocks(context + counts) * (taken & (counts > 0))
            taken &= np.cumsum(need) <= len(self._widened.steps)
        return counts * taken

    def _count_blocks(self, keys: np.ndarray) -> np.ndarray:
        blocks: np.ndarray = -(-keys // self._block)
        return blocks

    def _place_widened(
        self, memory: Widened, context: np.ndarray, fast: np.ndarray, put: Callable[[np.ndarray], Tensor]
    ) -> Widened:
        need = (self._count_blocks(context + fast) * (fast > 0)).astype(np.int32)
        bases = (np.cumsum(need) - need).astype(np.int32)
        pieces = np.zeros((len(memory.steps), 2), np.int32)
        row = np.repeat(np.arange(len(need)), need)
        pieces[: len(row), 0], pieces[: len(row), 1] = row, np.arange(len(row)) - bases[row]
        return replace(memory, pieces=put(pieces), count=put(np.array([len(row)], np.int32)), bases=put(bases))

    def forget(self) -> None:
        """Drop the tensor maps, since the caches may be at other addresses in the next step."""
        self._maps.decode.clear()
        self._maps.prefill.clear()

    def buffers(self) -> list[Tensor]:
        """Return the memory that kernels keep between steps."""
        scratch, widened = self._scratch, self._widened
        kept = [] if scratch is None else [scratch.partials, scratch.tops, scratch.counters]
        return kept if widened is None else [*kept, widened.keys, widened.values]  # without the small block_numbers

    def most_bytes(self, rows: int, tokens: int) -> int:
        """Return the most bytes that `plan` copies to the device for a step of so many rows and tokens."""
        if self._device.type != "cuda":
            return 0
        from emberline.kernels import worklist

        widened = 0 if self._widened is None else 8 * len(self._widened.steps) + 4 * rows + 64
        return 4 * worklist.ints(rows, self._capacity(rows)) + 2 * 8 * (rows + tokens) + widened

    def _plan_decode(self, lengths: np.ndarray, put: Callable[[np.ndarray], Tensor], *, beside: bool) -> decode.Work:
        from emberline.kernels import worklist
        from emberline.kernels.cuda import decode

        rows = len(lengths)
        items = worklist.plan(lengths, self._heads[1], self._sms, self._capacity(rows), beside=beside)
        return decode.Work(put(items.data), rows, items.capacity)

    def _capacity(self, rows: int) -> int:
        from emberline.kernels import worklist

        return worklist.capacity(rows, self._heads[1], self._sms)


def sms_for_chunks(
    cut: np.ndarray, context: np.ndarray, counts: np.ndarray, heads: tuple[int, int, int], reading: int, sms: int
) -> int:
    """Return the number of SMs for prefill tiles while decode reads `decode_bytes` of keys and values.

    All SMs, if one tile takes longer than that read. Otherwise so many that prefill ends when most of the read is done.
    Then both overlap most of the time: decode is bound by memory and prefill by arithmetic, though they share the
    bandwidth of the L2.
    """
    if not len(cut):
        return sms
    row, first = cut[:, 0], cut[:, 1]
    keys = context[row] + np.minimum(first + CHUNK_ROWS, counts[row])
    tile = 4 * CHUNK_ROWS * heads[2] / MULTIPLY * keys
    prefill_us, read_us = heads[0] * float(tile.sum()), reading / READ
    if read_us < float(tile.mean()):
        return sms
    count = round(prefill_us / (MOST_OF * (read_us + HINDERED * prefill_us / sms)))
    return min(max(count, sms // LEAST), sms - sms // LEFT)


def _allocate_widened(keys: Tensor, blocks: int) -> Widened:
    shape, empty = (blocks, *keys.shape[2:]), torch.zeros(0, dtype=torch.int32, device=keys.device)
    k, v = (torch.zeros(shape, dtype=torch.bfloat16, device=keys.device) for _ in range(2))
    return Widened(k, v, empty, empty, empty, torch.arange(blocks, dtype=torch.int32, device=keys.device))


def _shift_rows(tiles: np.ndarray, rows: int) -> np.ndarray:
    shifted: np.ndarray = tiles + np.array([rows, 0], tiles.dtype)
    return shifted


def holding(tiles: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the tiles that hold one of the tokens, which are numbered over all rows of `counts` and sorted."""
    ends = np.cumsum(counts)[tiles[:, 0]]
    begins = ends - counts[tiles[:, 0]] + tiles[:, 1]
    has_token = np.searchsorted(tokens, np.minimum(begins + CHUNK_ROWS, ends)) > np.searchsorted(tokens, begins)
    selected: np.ndarray = tiles[has_token]
    return selected


def most_tiles(tokens: int, rows: int) -> int:
    """Return the most prefill tiles that chunks of so many tokens in total can have."""
    return tokens // CHUNK_ROWS + rows


def _pad(tiles: np.ndarray, most: int) -> np.ndarray:
    padded: np.ndarray = np.concatenate([tiles, np.full((max(0, most - len(tiles)), 2), -1, tiles.dtype)])
    return padded
