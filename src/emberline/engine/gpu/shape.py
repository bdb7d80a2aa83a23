"""Shape: the size of a captured step. Few enough of them to capture, and little padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from emberline.core.plan import Work

CHUNKS = (8, 32)  # rows of chunks in a step of a large model
MAX_CHUNKS = 64  # of any model: 8,192 tokens are that many short prompts, and rows cost a small one little
MOST_TOKENS = 1024  # of them, for a large model; larger steps take longer than launching them does
GRAIN = 128  # tokens in a step with chunks: products of one more take as long as of so many more
BESIDE = 64  # rows of single tokens in a step that also has chunks come in multiples of this: most of them cost nothing
MOST_CAPTURED = 8192  # tokens of chunks in a captured step of any model
LAUNCH_FLOP = 7e12  # arithmetic that a device does while the host launches a step that is not captured (12 ms)


@dataclass(frozen=True, slots=True)
class Grid:
    """Which steps with chunks are captured: their sizes are rounded up to the grid's."""

    most_tokens: int = MOST_TOKENS  # of chunks; steps with more are not captured
    chunks: tuple[int, ...] = CHUNKS
    grain: int = GRAIN
    coarse: int = GRAIN  # the grain of steps with more than MOST_TOKENS

    @staticmethod
    def of(parameters: int, max_batch_tokens: int) -> Grid:
        """Return the grid for a model with so many weights in its layers.

        A step is captured as long as launching it takes longer than computing it. Padding costs a small model little,
        so few shapes serve it."""
        worth = min(int(LAUNCH_FLOP / (2 * parameters)), MOST_CAPTURED) // MOST_TOKENS * MOST_TOKENS
        if min(worth, max_batch_tokens) <= MOST_TOKENS:
            return Grid(min(MOST_TOKENS, max_batch_tokens))
        return Grid(min(worth, max_batch_tokens), (MAX_CHUNKS,), 2 * GRAIN, MOST_TOKENS)

    def tokens(self, total: int) -> int:
        """Return how many tokens a step gets that has so many, padding included."""
        grain = self.grain if total <= MOST_TOKENS + self.grain else self.coarse
        return -(-total // grain) * grain


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows [0, singles) have one token each, or none where there are chunks too; the others are chunks. Tokens of
    chunks follow those of singles at once, so that padding is behind them all."""

    singles: int
    chunks: int
    tokens: int  # besides as many as there are rows for singles

    @staticmethod
    def of(singles: Sequence[Work], chunks: Sequence[Work], grid: Grid | None = None) -> Shape | None:
        """Return None if no captured step serves: too many chunks or tokens, or prompts to be scored."""
        if not chunks:
            return Shape(captured_size(len(singles)), 0, 0)
        tokens = sum(len(w.tokens) for w in chunks)
        grid = grid or Grid()
        rows = next((rows for rows in grid.chunks if len(chunks) <= rows), None)
        if tokens > grid.most_tokens or rows is None or any(w.prompt_logprobs for w in chunks):
            return None
        padded = beside(len(singles))
        return Shape(padded, rows, grid.tokens(len(singles) + tokens) - padded)

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


def by_use(found: Iterable[Shape]) -> list[Shape]:
    """Return the shapes in the order in which a server whose load grows meets them, prompts having some 256 tokens."""

    def streams(s: Shape) -> float:
        beside = s.singles if not s.chunks or s.singles > BESIDE else s.singles / 8
        return beside + s.tokens / 256 + s.chunks / 32

    return sorted(found, key=lambda s: (streams(s), s.singles, s.chunks))


def shapes(max_running: int, max_batch_tokens: int, grid: Grid | None = None) -> set[Shape]:
    """All that captured steps can have, so that the memory of their graphs can be counted."""
    grid = grid or Grid(min(MOST_TOKENS, max_batch_tokens))
    alone = {Shape(captured_size(rows), 0, 0) for rows in range(1, max_running + 1)}
    mixed = {
        Shape(padded, rows, grid.tokens(total) - padded)
        for padded in range(0, beside(max_running - 1) + 1, BESIDE)
        for rows in grid.chunks
        for total in (*range(max(1, padded - BESIDE + 1), padded + grid.most_tokens, BESIDE), padded + grid.most_tokens)
    }
    return alone | mixed


def sizes(max_running: int, max_batch_tokens: int) -> set[int]:
    """Tokens that captured steps have."""
    return {shape.singles + shape.tokens for shape in shapes(max_running, max_batch_tokens)}


def most_rows(rows: int) -> int:
    """Of a step with so many requests, padding included."""
    return max(captured_size(rows), beside(rows)) + MAX_CHUNKS
