"""StepShape: the numbers of rows and tokens of a step that is captured as a CUDA graph.

A step runs with the next larger shape, filled up with padding. More shapes need less padding, but each shape must be
captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from emberline.core.engine_config import SchedulerConfig
from emberline.core.plan import WorkItem

CHUNK_ROW_COUNTS = (8, 32)  # rows for chunks in a captured step of a large model
MAX_CHUNKS = 64  # rows for chunks of any model: 8,192 tokens are that many short prompts, and empty rows cost little
# Tokens of chunks in a captured step of a large model; larger steps take longer than their launch.
MAX_CHUNK_TOKENS = 1024
# Tokens of a step with chunks are padded to a multiple: matrix products take as long for 1 as for 128 more.
TOKEN_GRAIN = 128
# Rows of single tokens in a step with chunks are padded to a multiple: empty rows cost almost nothing.
SINGLE_ROW_GRAIN = 64
MAX_CAPTURED_TOKENS = 8192  # tokens of chunks in a captured step of any model
LAUNCH_FLOP = 7e12  # operations that the device does while the host launches an uncaptured step (12 ms)
EXPERT_LAUNCH_FACTOR = 4  # how much longer the launch takes with experts: their kernels have many arguments


@dataclass(frozen=True, slots=True)
class ShapeGrid:
    """The sizes of captured steps with prompt chunks. Other sizes are rounded up to one of these."""

    max_tokens: int = MAX_CHUNK_TOKENS  # tokens of chunks; steps with more are not captured
    chunks: tuple[int, ...] = CHUNK_ROW_COUNTS
    grain: int = TOKEN_GRAIN
    coarse_grain: int = TOKEN_GRAIN  # grain of steps with more than MAX_CHUNK_TOKENS

    @staticmethod
    def for_model(
        parameter_count: int, max_batch_tokens: int, *, has_experts: bool = False, exchanging_ranks: int = 1
    ) -> ShapeGrid:
        """Return the sizes of steps to capture.

        `parameter_count`: number of weights in the model's layers that one token uses. A step is worth capturing if
        launching it takes longer than computing it. For a small model that is so for larger steps too; their sizes
        are coarser, because padding costs little there. `exchanging_ranks`: number of ranks that attend to requests
        of their own. Each also computes the padding of the others, so that capturing is worth it for smaller steps
        only."""
        if exchanging_ranks > 1:
            return ShapeGrid(min(max(TOKEN_GRAIN, MAX_CHUNK_TOKENS // exchanging_ranks), max_batch_tokens))
        operations = LAUNCH_FLOP * (EXPERT_LAUNCH_FACTOR if has_experts else 1)
        worth = min(int(operations / (2 * parameter_count)), MAX_CAPTURED_TOKENS) // MAX_CHUNK_TOKENS * MAX_CHUNK_TOKENS
        if min(worth, max_batch_tokens) <= MAX_CHUNK_TOKENS:
            return ShapeGrid(min(MAX_CHUNK_TOKENS, max_batch_tokens))
        return ShapeGrid(min(worth, max_batch_tokens), (MAX_CHUNKS,), 2 * TOKEN_GRAIN, MAX_CHUNK_TOKENS)

    def pad_token_count(self, token_count: int) -> int:
        """Return the padded number of tokens of a step with `token_count` tokens."""
        grain = self.grain if token_count <= MAX_CHUNK_TOKENS + self.grain else self.coarse_grain
        return -(-token_count // grain) * grain


@dataclass(frozen=True, slots=True)
class StepShape:
    """The padded size of a captured step: rows of decoding requests, then rows of prompt chunks.

    There are `singles` rows of the first kind and `chunks` of the second. A row of the first kind has one token, or up
    to `queries` tokens if there are drafts. In a step with chunks, padding rows of the first kind have no token, and
    the tokens of chunks directly follow those of the decoding requests. So all padding tokens are at the end."""

    singles: int
    chunks: int
    tokens: int  # in addition to one for each of `singles`
    queries: int = 1  # tokens that a row of the singles may have: more than 1 if there are drafts

    @staticmethod
    def for_work(
        single_tokens: int, chunks: Sequence[WorkItem], grid: ShapeGrid | None = None, queries: int = 1
    ) -> StepShape | None:
        """Return the shape of a step with this work; None if the step cannot be captured.

        `single_tokens`: tokens of decoding requests, with their drafts. Steps with too many chunks or tokens are not
        captured, nor steps that compute log-probabilities of prompts."""
        if any(w.prompt_logprobs for w in chunks):
            return None
        tokens = sum(len(w.tokens) for w in chunks)
        return StepShape.for_counts(single_tokens, len(chunks), tokens, grid or ShapeGrid(), queries)

    @staticmethod
    def for_counts(
        single_tokens: int, num_chunks: int, chunk_tokens: int, grid: ShapeGrid, queries: int
    ) -> StepShape | None:
        """Return the shape of a step with this many tokens; None if no captured step is large enough.

        `single_tokens`: tokens of requests that decode, with their drafts. `chunk_tokens`: of the chunks of prompts."""
        if not num_chunks:
            return StepShape(pad_row_count(single_tokens), 0, 0, queries)
        rows = next((rows for rows in grid.chunks if num_chunks <= rows), None)
        if chunk_tokens > grid.max_tokens or rows is None:
            return None
        padded = pad_single_row_count(single_tokens)
        return StepShape(padded, rows, grid.pad_token_count(single_tokens + chunk_tokens) - padded, queries)

    @property
    def rows(self) -> int:
        return self.singles + self.chunks


def pad_row_count(row_count: int) -> int:
    """Return the number of rows to capture for `row_count` rows: the next of 1 2 4 8 16 24 ...

    Above 384 it is a multiple of 128: with other numbers of rows, cuBLAS is up to a third slower."""
    for limit, step in ((2, 1), (4, 2), (8, 4), (64, 8), (256, 16), (384, 64)):
        if row_count <= limit:
            return -(-row_count // step) * step
    return -(-row_count // TOKEN_GRAIN) * TOKEN_GRAIN


def pad_single_row_count(row_count: int) -> int:
    """Return the number of one-token rows to capture for a step that also has prompt chunks."""
    return -(-row_count // SINGLE_ROW_GRAIN) * SINGLE_ROW_GRAIN


def order_by_expected_use(shapes: Iterable[StepShape]) -> list[StepShape]:
    """Sort the shapes by when a server with growing load is expected to need them first.

    The estimate assumes prompts of 256 tokens."""

    def streams_at_first_use(shape: StepShape) -> float:
        singles = shape.singles if not shape.chunks or shape.singles > SINGLE_ROW_GRAIN else shape.singles / 8
        return singles + shape.tokens / 256 + shape.chunks / 32

    return sorted(shapes, key=lambda shape: (streams_at_first_use(shape), shape.singles, shape.chunks))


def captured_shapes(
    max_running: int, max_batch_tokens: int, grid: ShapeGrid | None = None, *, queries: Sequence[int] = ()
) -> set[StepShape]:
    """Return all shapes of steps that are captured ahead of their use.

    `queries`: numbers of tokens that a row may have in steps with drafts. Of these steps, those with chunks are not
    included: they are captured at their first use."""
    grid = grid or ShapeGrid(min(MAX_CHUNK_TOKENS, max_batch_tokens))
    without_chunks = {StepShape(pad_row_count(rows), 0, 0) for rows in range(1, max_running + 1)}
    mixed = {
        StepShape(padded, rows, grid.pad_token_count(total) - padded)
        for padded in range(0, pad_single_row_count(max_running - 1) + 1, SINGLE_ROW_GRAIN)
        for rows in grid.chunks
        for total in (
            *range(max(1, padded - SINGLE_ROW_GRAIN + 1), padded + grid.max_tokens, SINGLE_ROW_GRAIN),
            padded + grid.max_tokens,
        )
    }
    with_drafts = {replace(shape, queries=count) for shape in without_chunks if shape.singles > 1 for count in queries}
    return without_chunks | with_drafts | mixed


def captured_token_counts(max_running: int, max_batch_tokens: int) -> set[int]:
    """Return the numbers of tokens that captured steps can have."""
    return {shape.singles + shape.tokens for shape in captured_shapes(max_running, max_batch_tokens)}


def max_step_rows(request_count: int) -> int:
    """Return the maximum number of rows, including padding, of a step with `request_count` requests."""
    return max(pad_row_count(request_count), pad_single_row_count(request_count)) + MAX_CHUNKS


def max_draft_rows(request_count: int, *, reads_states: bool) -> int:
    """Return the maximum number of rows, including padding, of a pass of a draft model.

    `reads_states`: whether the draft model reads hidden states of the target model. If not, it computes the last two
    tokens of each request, as two rows."""
    step_rows = max_step_rows(request_count)
    return step_rows if reads_states else max(step_rows, 2 * pad_row_count(request_count))


def max_step_tokens(shapes: Iterable[StepShape], grid: ShapeGrid, limits: SchedulerConfig) -> int:
    """Return the maximum number of tokens, including padding, of a step, captured with one of the shapes or not."""
    uncaptured = grid.pad_token_count(limits.max_batch_tokens) + max_step_rows(limits.max_running)
    return max(uncaptured, *(shape.singles + shape.tokens for shape in shapes))
