"""StepShape: the size of a captured step.

There are few shapes, to limit captures, but enough to limit padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from emberline.core.plan import Work

CHUNKS = (8, 32)  # rows for chunks in a captured step of a large model
MAX_CHUNKS = 64  # rows for chunks of any model: 8,192 tokens are that many short prompts, and empty rows cost little
MOST_TOKENS = 1024  # tokens of chunks in a captured step of a large model; larger steps take longer than their launch
GRAIN = 128  # tokens of a step with chunks are padded to a multiple: matrix products take as long for 1 as for 128 more
BESIDE = 64  # rows of single tokens in a step with chunks are padded to a multiple: empty rows cost almost nothing
MOST_CAPTURED = 8192  # tokens of chunks in a captured step of any model
LAUNCH_FLOP = 7e12  # operations that the device does while the host launches an uncaptured step (12 ms)


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes of captured steps with chunks. Other sizes are rounded up to one of them."""

    most_tokens: int = MOST_TOKENS  # tokens of chunks; steps with more are not captured
    chunks: tuple[int, ...] = CHUNKS
    grain: int = GRAIN
    coarse: int = GRAIN  # grain of steps with more than MAX_CHUNK_TOKENS

    @staticmethod
    def of(parameters: int, max_batch_tokens: int) -> Grid:
        """Return the grid for a model with `parameters` weights in its layers.

        A step is captured if launching it takes longer than computing it. Padding costs a small model little, so a
        small model gets few shapes."""
        worth = min(int(LAUNCH_FLOP / (2 * parameters)), MOST_CAPTURED) // MOST_TOKENS * MOST_TOKENS
        if min(worth, max_batch_tokens) <= MOST_TOKENS:
            return Grid(min(MOST_TOKENS, max_batch_tokens))
        return Grid(min(worth, max_batch_tokens), (MAX_CHUNKS,), 2 * GRAIN, MOST_TOKENS)

    def tokens(self, total: int) -> int:
        """Return the padded number of tokens of a step with `total` tokens."""
        grain = self.grain if total <= MOST_TOKENS + self.grain else self.coarse
        return -(-total // grain) * grain


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows [0, singles) have one token each, or none if there are chunks too; the other rows are chunks.

    Tokens of chunks directly follow those of singles, so that all padding is at the end."""

    singles: int
    chunks: int
    tokens: int  # in addition to one for each of `singles`

    @staticmethod
    def of(singles: Sequence[Work], chunks: Sequence[Work], grid: Grid | None = None) -> Shape | None:
        """Return the shape of a step with this work; None if it cannot be captured.

        That is so for too many chunks or tokens, and for prompts with log-probabilities."""
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
    """Return the padded number of rows: 1 2 4 8 16 24 ... with growing steps.

    Above 384 rows, cuBLAS is up to a third slower if they are not a multiple of 128."""
    for most, step in ((2, 1), (4, 2), (8, 4), (64, 8), (256, 16), (384, 64)):
        if rows <= most:
            return -(-rows // step) * step
    return -(-rows // GRAIN) * GRAIN


def beside(singles: int) -> int:
    """Return the padded number of rows for single tokens in a step that also has chunks."""
    return -(-singles // BESIDE) * BESIDE


def by_use(found: Iterable[Shape]) -> list[Shape]:
    """Return the shapes in the order in which a server with growing load needs them.

    The estimate assumes prompts of 256 tokens."""

    def streams(s: Shape) -> float:
        singles = s.singles if not s.chunks or s.singles > BESIDE else s.singles / 8
        return singles + s.tokens / 256 + s.chunks / 32

    return sorted(found, key=lambda s: (streams(s), s.singles, s.chunks))


def shapes(max_running: int, max_batch_tokens: int, grid: Grid | None = None) -> set[Shape]:
    """Return all shapes that captured steps can have."""
    grid = grid or Grid(min(MOST_TOKENS, max_batch_tokens))
    without_chunks = {Shape(captured_size(rows), 0, 0) for rows in range(1, max_running + 1)}
    mixed = {
        Shape(padded, rows, grid.tokens(total) - padded)
        for padded in range(0, beside(max_running - 1) + 1, BESIDE)
        for rows in grid.chunks
        for total in (*range(max(1, padded - BESIDE + 1), padded + grid.most_tokens, BESIDE), padded + grid.most_tokens)
    }
    return without_chunks | mixed


def sizes(max_running: int, max_batch_tokens: int) -> set[int]:
    """Return the numbers of tokens that captured steps can have."""
    return {shape.singles + shape.tokens for shape in shapes(max_running, max_batch_tokens)}


def most_rows(rows: int) -> int:
    """Return the largest number of rows of a step with `rows` requests, including padding."""
    return max(captured_size(rows), beside(rows)) + MAX_CHUNKS
