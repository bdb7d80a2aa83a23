"""Shape: the size of a captured step. Few enough of them to capture, and little padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emberline.core.plan import Work

CHUNKS = (8, 32)  # rows of chunks in a step
MOST_TOKENS = 1024  # of them; larger steps take longer than launching them does
GRAIN = 128  # tokens in a step with chunks: products of one more take as long as of so many more
BESIDE = 64  # rows of single tokens in a step that also has chunks come in multiples of this: most of them cost nothing


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows [0, singles) have one token each, or none where there are chunks too; the others are chunks. Tokens of
    chunks follow those of singles at once, so that padding is behind them all."""

    singles: int
    chunks: int
    tokens: int  # besides as many as there are rows for singles

    @staticmethod
    def of(singles: Sequence[Work], chunks: Sequence[Work]) -> Shape | None:
        """None: no captured step serves, since there are too many chunks or tokens, or prompts to be scored."""
        if not chunks:
            return Shape(captured_size(len(singles)), 0, 0)
        tokens = sum(len(w.tokens) for w in chunks)
        rows = next((rows for rows in CHUNKS if len(chunks) <= rows), None)
        if tokens > MOST_TOKENS or rows is None or any(w.prompt_logprobs for w in chunks):
            return None
        padded = beside(len(singles))
        return Shape(padded, rows, -(-(len(singles) + tokens) // GRAIN) * GRAIN - padded)

    @property
    def rows(self) -> int:
        return self.singles + self.chunks


def captured_size(rows: int) -> int:
    """1 2 4 8, then eighths and so on. Past 384, cuBLAS is up to a third slower where it is not a multiple of 128."""
    for most, step in ((2, 1), (4, 2), (8, 4), (64, 8), (256, 16), (384, 64)):
        if rows <= most:
            return -(-rows // step) * step
    return -(-rows // GRAIN) * GRAIN


def beside(singles: int) -> int:
    """Rows for so many single tokens, in a step that also has chunks."""
    return -(-singles // BESIDE) * BESIDE


def shapes(max_running: int, max_batch_tokens: int) -> set[Shape]:
    """All that steps can have, so that the memory of their graphs can be counted."""
    alone = {Shape(captured_size(rows), 0, 0) for rows in range(1, max_running + 1)}
    most = min(MOST_TOKENS, max_batch_tokens)
    mixed = {
        Shape(padded, rows, total - padded)
        for padded in range(0, beside(max_running - 1) + 1, BESIDE)
        for rows in CHUNKS
        for total in range(max(1, -(-padded // GRAIN)) * GRAIN, padded + most + GRAIN, GRAIN)
    }
    return alone | mixed


def sizes(max_running: int, max_batch_tokens: int) -> set[int]:
    """Tokens that captured steps have."""
    return {shape.singles + shape.tokens for shape in shapes(max_running, max_batch_tokens)}


def most_rows(rows: int) -> int:
    """Of a step with so many requests, padding included."""
    return max(captured_size(rows), beside(rows)) + CHUNKS[-1]
