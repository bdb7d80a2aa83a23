"""Batch: a plan's work in the order the device takes it, as arrays. Pure numpy.

rows of the step    [0, singles) have one token each     [singles, len(work)) are chunks of prompts
tokens of the step  [0, singles) theirs                  [singles, tokens) the chunks', one after the other
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emberline.core.plan import Work
from emberline.engine.gpu.rows import Rows


@dataclass(frozen=True, slots=True)
class Batch:
    work: Sequence[Work]  # in order
    singles: int
    rows: np.ndarray  # [B] int64: the device's row of each
    starts: np.ndarray  # [B] int32: tokens in the cache before this step
    counts: np.ndarray  # [B] int32
    tokens: np.ndarray  # [T] int64, with PENDING where the device knows better
    positions: np.ndarray  # [T] int32
    slots: np.ndarray  # [T] int64
    token_rows: np.ndarray  # [T] int64: the row of each token's request

    @staticmethod
    def split(work: Sequence[Work]) -> tuple[list[Work], list[Work]]:
        """Single tokens, and chunks. Who wants the prompt scored is a chunk whatever its length."""
        singles = [w for w in work if len(w.tokens) == 1 and not w.prompt_logprobs]
        return singles, [w for w in work if len(w.tokens) > 1 or w.prompt_logprobs]

    @staticmethod
    def nobody(size: int, row: int) -> Batch:
        """Single tokens of a row that nobody owns: they see one key and write nothing."""
        zeros, one = np.zeros(size, np.int32), np.zeros(size, np.int64)
        return Batch((), size, one + row, zeros, zeros + 1, one, zeros, one - 1, one + row)

    @staticmethod
    def of(ordered: Sequence[Work], rows: Rows, block_size: int) -> Batch:
        """Single tokens come first in `ordered`."""
        singles = sum(len(w.tokens) == 1 and not w.prompt_logprobs for w in ordered)
        index = np.fromiter((rows[w.id].index for w in ordered), np.int64, len(ordered))
        starts = np.fromiter((w.start for w in ordered), np.int32, len(ordered))
        counts = np.fromiter((len(w.tokens) for w in ordered), np.int32, len(ordered))
        total = int(counts.sum())
        tokens = np.fromiter((t for w in ordered for t in w.tokens), np.int64, total)
        if total == len(ordered):
            positions, token_rows = starts, index
        else:
            first = np.cumsum(counts) - counts
            positions = np.arange(total, dtype=np.int32) - np.repeat(first - starts, counts).astype(np.int32)
            token_rows = np.repeat(index, counts)
        slots = rows.mirror[token_rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return Batch(ordered, singles, index, starts, counts, tokens, positions, slots, token_rows)

    def padded(self, size: int, row: int) -> Batch:
        """With as many of nobody's as make up a captured step's size."""
        assert self.singles == len(self.work)
        more = Batch.nobody(size - len(self.work), row)
        rows, starts = np.concatenate([self.rows, more.rows]), np.concatenate([self.starts, more.starts])
        return Batch(
            self.work,
            size,
            rows,
            starts,
            np.concatenate([self.counts, more.counts]),
            np.concatenate([self.tokens, more.tokens]),
            starts,
            np.concatenate([self.slots, more.slots]),
            rows,
        )

    @property
    def query_start(self) -> np.ndarray:
        ends = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=ends[1:])
        return ends

    def logit_rows(self) -> np.ndarray:
        """Of the step's tokens, those whose logits are wanted, in order."""
        start = self.query_start
        wanted = [
            np.arange(start[i] if w.prompt_logprobs else start[i + 1] - 1, start[i + 1])
            for i, w in enumerate(self.work)
            if w.samples or w.prompt_logprobs
        ]
        return np.concatenate(wanted).astype(np.int64) if wanted else np.zeros(0, np.int64)
