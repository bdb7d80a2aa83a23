"""Tiles: how a step's attention is cut into pieces of work for a GPU; made on the host, which knows every length.

Rows [0, singles) have one token each and are cut along their keys; the others are chunks of prompts, cut along their
queries. Other devices cut for themselves: theirs are empty.
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

CHUNK_ROWS = 128  # queries of a tile of chunks
GATED_ROWS = 16  # of gate, then as many of up, in turn: so that a kernel that has one has the other

# Of an H200, a microsecond: bytes that all of it reads, and operations of a multiprocessor.
READ, MULTIPLY = 4.1e6, 5.2e6
LEFT, LEAST = 6, 8  # one of so many multiprocessors, at least, is left to single tokens; or has chunks
MOST_OF, HINDERED = 0.58, 0.65  # of the time of both together; of chunks' own, how much singles' takes longer


@dataclass(slots=True)
class Maps:
    """What kernels keep of the caches of one runner: by a layer's address, as the copy engine sees it."""

    decode: dict[int, decode.LayerCache] = field(default_factory=dict)
    prefill: dict[int, prefill.PagedCache] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Widened:
    """Keys and values of chunks' rows as bf16, where the cache has them in float8: a layer's at a time."""

    keys: Tensor  # [blocks, heads, size, dim]
    values: Tensor
    pieces: Tensor  # [blocks, 2] int32: whose they are: the row, and which of its blocks
    count: Tensor  # [1] int32: of the pieces
    bases: Tensor  # [rows] int32: where a row's blocks begin
    steps: Tensor  # [blocks] int32: 0 1 2 ..
    tables: Tensor | None = None  # [rows, blocks] int32

    def laid(self) -> Widened:
        return replace(self, tables=self.bases[:, None] + self.steps)


@dataclass(frozen=True, slots=True)
class Tiles:
    singles: int
    work: decode.Work | None = None  # of the singles
    scratch: decode.Scratch | None = None
    chunks: Tensor | None = None  # [n, 2] int32: the row, and its first query
    sought: Tensor | None = None  # of these, the ones that hold a query whose logits are wanted; None: not told apart
    general: Tensor | None = None  # the same, where only the general kernel serves
    queries: int = 0  # of one of these
    chunk_sms: Tensor | None = None  # [1] int32: multiprocessors for chunks, beside which singles have the others
    counters: Tensor | None = None  # of the kernel for chunks
    widened: Widened | None = None
    maps: Maps = field(default_factory=Maps)

    def last(self) -> Tiles:
        """For the last layer, after which nobody asks for the other queries."""
        return self if self.sought is None else replace(self, chunks=self.sought)

    def laid(self) -> Tiles:
        """At the beginning of a step: with what the device makes of them once for all layers."""
        return self if self.widened is None else replace(self, widened=self.widened.laid())


class Cutter:
    def __init__(
        self, heads: tuple[int, int, int], keys: Tensor, dtype: torch.dtype, rows: int, *, widened: int = 0
    ) -> None:
        """For steps of at most so many rows. `heads` of queries, of keys, and their size; `dtype` of activations.
        `widened`: blocks of float8 that there is to be room for as bf16, all rows of chunks together."""
        self._heads, self._device, self._key_bytes = heads, keys.device, keys.element_size()
        self._maps = Maps()
        self._decodes = self._prefills = False
        self._scratch: decode.Scratch | None = None
        self._counters: Tensor | None = None
        self._room: Widened | None = None
        self._block = keys.shape[3]
        if keys.is_cuda:
            from emberline.kernels.cuda import decode, prefill

            narrow = dtype is torch.bfloat16
            self._decodes = narrow and decode.supports(*heads, keys.dtype, keys.shape[3])
            self._prefills = narrow and prefill.supports(keys[0])
            self._sms = decode.multiprocessors(keys.device)
            self._counters = prefill.new_counters(keys.device)
            narrow_keys = keys.dtype is torch.float8_e4m3fn
            if widened and narrow_keys and self._decodes and prefill.serves(*keys.shape[3:]):
                self._room, self._prefills = _room(keys, widened), True
            if self._decodes:
                self._scratch = decode.Scratch(rows, self._capacity(rows), *heads, keys.device)

    @property
    def fixed(self) -> bool:
        """Whether all that `cut` makes can have a shape of its own choice, as a graph needs it."""
        return self._device.type != "cuda" or (self._decodes and self._prefills)

    def fits(self, lengths: Iterable[int]) -> bool:
        """Whether chunks' rows of so many keys can be widened, if they must be: else some go to a slower kernel, and
        what `cut` makes has another form."""
        return self._room is None or int(self._blocks(np.fromiter(lengths, np.int64)).sum()) <= len(self._room.steps)

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
        """`put` brings an array to the device. What is made for singles alone has shapes that depend on their number
        alone; tiles of chunks are padded to `most`. `sought`: the tokens whose logits are wanted, in order."""
        tiles = Tiles(singles, counters=self._counters, maps=self._maps)
        if self._device.type != "cuda":
            return tiles
        rest = singles if self._decodes else 0  # the kernels for chunks serve single tokens too
        chunks, cut = rest < len(counts), None
        quick = self._quick(context, counts, rest) if chunks else counts
        if chunks and self._prefills:
            from emberline.kernels.cuda import prefill

            cut = _shifted(prefill.tiles(quick[rest:], context[rest:]), rest)
        if rest and cut is not None:
            bytes_ = int(context[:rest].sum()) * 2 * self._heads[1] * self._heads[2] * self._key_bytes
            few = sms_for_chunks(cut, context, counts, self._heads, bytes_, self._sms)
            tiles = replace(tiles, chunk_sms=put(np.array([few], np.int32)))
        if rest:
            work = self._work((context[:rest] + 1) * counts[:rest], put, beside=cut is not None)
            tiles = replace(tiles, work=work, scratch=self._scratch)
        if cut is not None:
            widened = None if self._room is None else self._widened(self._room, context, quick, put)
            tiles = replace(tiles, chunks=put(_padded(cut, most)), widened=widened)
            tiles = tiles if sought is None else replace(tiles, sought=put(holding(cut, counts, sought)))
        if not chunks or not (slow := (counts - quick)[rest:]).any():
            return tiles
        from emberline.kernels.triton import attention

        queries = attention.tile_queries(int(slow.max()), self._heads[0] // self._heads[1])
        return replace(tiles, general=put(_shifted(attention.make_tiles(slow, queries), rest)), queries=queries)

    def _quick(self, context: np.ndarray, counts: np.ndarray, rest: int) -> np.ndarray:
        """Tokens of each row that the fast kernel for chunks takes: all of a row or none."""
        taken = (np.arange(len(counts)) >= rest) & self._prefills
        if self._room is not None:
            need = self._blocks(context + counts) * (taken & (counts > 0))
            taken &= np.cumsum(need) <= len(self._room.steps)
        return counts * taken

    def _blocks(self, keys: np.ndarray) -> np.ndarray:
        blocks: np.ndarray = -(-keys // self._block)
        return blocks

    def _widened(
        self, room: Widened, context: np.ndarray, quick: np.ndarray, put: Callable[[np.ndarray], Tensor]
    ) -> Widened:
        need = (self._blocks(context + quick) * (quick > 0)).astype(np.int32)
        bases = (np.cumsum(need) - need).astype(np.int32)
        pieces = np.zeros((len(room.steps), 2), np.int32)
        row = np.repeat(np.arange(len(need)), need)
        pieces[: len(row), 0], pieces[: len(row), 1] = row, np.arange(len(row)) - bases[row]
        return replace(room, pieces=put(pieces), count=put(np.array([len(row)], np.int32)), bases=put(bases))

    def forget(self) -> None:
        """The caches may lie elsewhere when they are met again."""
        self._maps.decode.clear()
        self._maps.prefill.clear()

    def buffers(self) -> list[Tensor]:
        """What kernels keep for themselves between steps."""
        scratch, room = self._scratch, self._room
        kept = [] if scratch is None else [scratch.partials, scratch.tops, scratch.counters]
        return kept if room is None else [*kept, room.keys, room.values]  # and not what counts their blocks

    def most_bytes(self, rows: int, tokens: int) -> int:
        """Of what `cut` puts, for a step of so many rows and tokens."""
        if self._device.type != "cuda":
            return 0
        from emberline.kernels import worklist

        widened = 0 if self._room is None else 8 * len(self._room.steps) + 4 * rows + 64
        return 4 * worklist.ints(rows, self._capacity(rows)) + 2 * 8 * (rows + tokens) + widened

    def _work(self, lengths: np.ndarray, put: Callable[[np.ndarray], Tensor], *, beside: bool) -> decode.Work:
        from emberline.kernels import worklist
        from emberline.kernels.cuda import decode

        rows = len(lengths)
        made = worklist.plan(lengths, self._heads[1], self._sms, self._capacity(rows), beside=beside)
        return decode.Work(put(made.data), rows, made.capacity)

    def _capacity(self, rows: int) -> int:
        from emberline.kernels import worklist

        return worklist.capacity(rows, self._heads[1], self._sms)


def sms_for_chunks(
    cut: np.ndarray, context: np.ndarray, counts: np.ndarray, heads: tuple[int, int, int], reading: int, sms: int
) -> int:
    """For the tiles of chunks, beside single tokens with so many bytes of keys and values: all, if a tile takes longer
    than reading those. Else as many as are done when most of the reading is, so that both are under way most of the
    time: one is bound by memory, the other by products, though both live on what the L2 hands out."""
    if not len(cut):
        return sms
    row, first = cut[:, 0], cut[:, 1]
    keys = context[row] + np.minimum(first + CHUNK_ROWS, counts[row])
    tile = 4 * CHUNK_ROWS * heads[2] / MULTIPLY * keys
    multiplying, read = heads[0] * float(tile.sum()), reading / READ
    if read < float(tile.mean()):
        return sms
    few = round(multiplying / (MOST_OF * (read + HINDERED * multiplying / sms)))
    return min(max(few, sms // LEAST), sms - sms // LEFT)


def _room(keys: Tensor, blocks: int) -> Widened:
    shape, none = (blocks, *keys.shape[2:]), torch.zeros(0, dtype=torch.int32, device=keys.device)
    k, v = (torch.zeros(shape, dtype=torch.bfloat16, device=keys.device) for _ in range(2))
    return Widened(k, v, none, none, none, torch.arange(blocks, dtype=torch.int32, device=keys.device))


def _shifted(tiles: np.ndarray, rows: int) -> np.ndarray:
    shifted: np.ndarray = tiles + np.array([rows, 0], tiles.dtype)
    return shifted


def holding(tiles: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Of the tiles, those with one of the tokens, which are numbered over all rows of `counts` and in order."""
    ends = np.cumsum(counts)[tiles[:, 0]]
    begins = ends - counts[tiles[:, 0]] + tiles[:, 1]
    within = np.searchsorted(tokens, np.minimum(begins + CHUNK_ROWS, ends)) > np.searchsorted(tokens, begins)
    held: np.ndarray = tiles[within]
    return held


def most_tiles(tokens: int, rows: int) -> int:
    """Of chunks of so many tokens, all together."""
    return tokens // CHUNK_ROWS + rows


def _padded(tiles: np.ndarray, most: int) -> np.ndarray:
    padded: np.ndarray = np.concatenate([tiles, np.full((max(0, most - len(tiles)), 2), -1, tiles.dtype)])
    return padded
