"""Batch: a plan's work in the order the device takes it, as arrays. Pure numpy.

rows of the step    [0, singles) have one token each     [singles, ...) are chunks of prompts
tokens of the step  theirs                               the chunks', one after the other
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emberline.core.plan import PENDING, Work
from emberline.engine.gpu.rows import Rows
from emberline.engine.gpu.shape import Shape


@dataclass(frozen=True, slots=True)
class Batch:
    singles: int
    rows: np.ndarray  # [B] int64: the device's row of each
    starts: np.ndarray  # [B] int32: tokens in the cache before this step
    counts: np.ndarray  # [B] int32; of a padded step with chunks, singles may have none
    tokens: np.ndarray  # [T] int64, with PENDING where the device knows better
    positions: np.ndarray  # [T] int32
    slots: np.ndarray  # [T] int64
    token_rows: np.ndarray  # [T] int64: the row of each token's request
    logit_rows: np.ndarray  # [S] int64: of the tokens, those whose logits are computed
    wanted: np.ndarray  # int64: of these, those that somebody wants, in order

    @staticmethod
    def split(work: Sequence[Work]) -> tuple[list[Work], list[Work]]:
        """Single tokens that sample, and chunks: all else, whatever its length."""
        chunks = [w for w in work if len(w.tokens) > 1 or not w.samples or w.prompt_logprobs]
        if not chunks:
            return list(work), []
        return [w for w in work if len(w.tokens) == 1 and w.samples and not w.prompt_logprobs], chunks

    @staticmethod
    def of(singles: Sequence[Work], chunks: Sequence[Work], rows: Rows, block_size: int) -> Batch:
        work = [*singles, *chunks]
        # Of lists, which takes half as long as to iterate over generators.
        index = np.array([place.index for place in rows.places(work)], np.int64)
        starts = np.array([w.start for w in work], np.int32)
        counts = np.ones(len(work), np.int32)
        counts[len(singles) :] = [len(w.tokens) for w in chunks]
        total = int(counts.sum())
        ones = np.array([w.tokens[0] for w in singles], np.int64)
        tokens = np.concatenate([ones, *(_ids(w.tokens) for w in chunks)])
        ends = np.cumsum(counts)
        positions = np.arange(total, dtype=np.int32) - np.repeat(ends - counts - starts, counts).astype(np.int32)
        token_rows = np.repeat(index, counts)
        at = token_rows * rows.mirror.shape[1] + positions // block_size
        slots = rows.mirror.take(at).astype(np.int64) * block_size + positions % block_size
        scored = [
            np.arange(end - len(w.tokens) if w.prompt_logprobs else end - 1, end)
            for w, end in zip(chunks, ends[len(singles) :].tolist(), strict=True)
            if w.samples or w.prompt_logprobs
        ]
        logit_rows = np.concatenate([np.arange(len(singles)), *scored]).astype(np.int64)
        wanted = np.arange(len(logit_rows))
        return Batch(len(singles), index, starts, counts, tokens, positions, slots, token_rows, logit_rows, wanted)

    def shaped(self, shape: Shape, row: int) -> Batch:
        """With as much of nobody's as makes up a captured step: rows behind the singles and behind the chunks, and
        tokens behind all others. `row` is nobody's. Its tokens write nothing; where all have one, each sees one key."""
        s, chunks, total = self.singles, len(self.rows) - self.singles, shape.singles + shape.tokens
        scored = self.logit_rows[s:]
        alone = shape.chunks == 0

        def rows(ours: np.ndarray, single: int, chunk: int) -> np.ndarray:
            made = np.full(shape.rows, chunk, ours.dtype)
            made[:s], made[s : shape.singles] = ours[:s], single
            made[shape.singles : shape.singles + chunks] = ours[s:]
            return made

        def tokens(ours: np.ndarray, nobodys: int) -> np.ndarray:
            made = np.full(total, nobodys, ours.dtype)
            made[: len(ours)] = ours
            return made

        logit_rows = np.zeros(shape.rows, np.int64)
        first = shape.singles if alone else s
        logit_rows[:first] = np.arange(first)
        logit_rows[shape.singles : shape.singles + len(scored)] = scored
        wanted = np.arange(s + len(scored))
        wanted[s:] += shape.singles - s
        return Batch(
            shape.singles,
            rows(self.rows, row, row),
            rows(self.starts, 0, 0),
            rows(self.counts, int(alone), 0),
            tokens(self.tokens, 0),
            tokens(self.positions, 0),
            tokens(self.slots, -1),
            tokens(self.token_rows, row),
            logit_rows,
            wanted,
        )

    @property
    def query_start(self) -> np.ndarray:
        ends = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=ends[1:])
        return ends


def _ids(tokens: Sequence[int]) -> np.ndarray:
    """Of a long prompt, in half the time that numpy takes: as C's unsigned numbers, which all but PENDING are."""
    return np.array(tokens, np.int64) if tokens[-1] == PENDING else np.frombuffer(array("Q", tokens), np.int64)
