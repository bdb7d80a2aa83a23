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
    def of(work: Sequence[Work], rows: Rows, block_size: int) -> Batch:
        singles = [w for w in work if len(w.tokens) == 1 and not w.prompt_logprobs]
        chunks = [w for w in work if len(w.tokens) > 1 or w.prompt_logprobs]
        ordered = [*singles, *chunks]
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
        return Batch(ordered, len(singles), index, starts, counts, tokens, positions, slots, token_rows)

    def padded(self, size: int, padding_row: int) -> Batch:
        """With rows nobody owns, up to a captured step's size: they see one key, write nothing, and are not read."""
        assert self.singles == len(self.work)
        extra = size - len(self.work)
        if not extra:
            return self

        def pad(values: np.ndarray, filler: int) -> np.ndarray:
            return np.concatenate([values, np.full(extra, filler, values.dtype)])

        rows, starts = pad(self.rows, padding_row), pad(self.starts, 0)
        return Batch(
            self.work, size, rows, starts, pad(self.counts, 1), pad(self.tokens, 0), starts, pad(self.slots, -1), rows
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
