"""sample, log_probs, apply_bitmask, edit, penalise, count_tokens: what `kernels/ref.py` says of them, over rows of
logits on a GPU. `sample.cu` says how.

A row's answer depends on that row alone, to the bit. Nothing here waits for the device, and nothing is allocated where
`out` is given, so all of it can be captured in a graph.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import Kernel, Module

FILE = "sample.cu"
VARIANTS = ("sample", "log_probs", "apply_bitmask", "edit", "penalise", "count_tokens")
THREADS = 1024  # of a row
FEW_THREADS = 256  # of a block where each thread stands alone
MOST_VOCAB = (1 << 20) - 1  # an id has 20 bits, and the sum of all weights 64
MOST_TOP = 64
COUNTS_PER_THREAD = 8

Scores = tuple[Tensor, Tensor, Tensor, Tensor]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    out: Tensor,
    *,
    pdl: bool = True,
) -> Tensor:
    """One id per row into `out`; the uniform number is that of (seed, position). The logits stay as they are. NaN is
    taken for -inf; a row whose largest logit is not finite gives the first such id."""
    rows = _rows(logits)
    kinds = (temperature, torch.float32), (top_p, torch.float32), (min_p, torch.float32), (top_k, torch.int32)
    for given, kind in (*kinds, (position, torch.int32), (seed, torch.int64), (out, torch.int64)):
        assert given.dtype is kind and given.shape == (rows,) and given.is_contiguous()
    if rows:
        settings = temperature, top_k, top_p, min_p, seed, position
        _kernels()["sample"]((rows, 1, 1), THREADS, (*_where(logits), *settings, out), pdl=pdl)
    return out


def log_probs(logits: Tensor, ids: Tensor, top_n: int, *, out: Scores | None = None) -> Scores:
    """(log-probability of ids [S], the top ids [S, n], theirs [S, n], rank of ids [S]); rank 1 is the most probable."""
    rows = _rows(logits)
    assert ids.dtype is torch.int64 and ids.shape == (rows,) and ids.is_contiguous()
    assert 0 <= top_n <= min(MOST_TOP, logits.shape[1])
    out = _scores(rows, top_n, logits.device) if out is None else out
    if rows:
        _kernels()["log_probs"]((rows, 1, 1), THREADS, (*_where(logits), ids, top_n, *out), pdl=True)
    return out


def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """logits[rows[i], t] becomes -inf wherever bit t of mask[i] (little-endian int32 words) is 0."""
    _rows(logits)
    count, words = mask.shape
    assert mask.dtype is torch.int32 and mask.is_contiguous() and 32 * words >= logits.shape[1]
    assert rows.dtype is torch.int64 and rows.shape == (count,) and rows.is_contiguous()
    if count:
        grid = (-(-logits.shape[1] // FEW_THREADS), count, 1)
        _kernels()["apply_bitmask"](grid, FEW_THREADS, (*_where(logits), mask, words, rows), pdl=True)


def edit(logits: Tensor, rows: Tensor, ids: Tensor, divide: Tensor, add: Tensor) -> None:
    """Single logits, each (row, id) once: divided if positive and multiplied if not, then added to. Rows of -1 are
    padding."""
    _rows(logits)
    count = len(rows)
    for given, kind in ((rows, torch.int32), (ids, torch.int32), (divide, torch.float32), (add, torch.float32)):
        assert given.dtype is kind and given.shape == (count,) and given.is_contiguous()
    if count:
        grid = (-(-count // FEW_THREADS), 1, 1)
        _kernels()["edit"](grid, FEW_THREADS, (logits, logits.stride(0), count, rows, ids, divide, add), pdl=True)


def penalise(logits: Tensor, rows: Tensor, slots: Tensor, settings: Tensor, counts: Tensor) -> None:
    """As `ref.penalise`. Rows of the counts are as wide as a multiple of 8 that is not below the vocabulary."""
    _rows(logits)
    vocab, count = logits.shape[1], len(rows)
    width = _count_width(counts)
    assert width >= vocab and rows.dtype is slots.dtype is torch.int32 and settings.dtype is torch.float32
    assert slots.shape == (count,) and settings.shape == (count, 3) and settings.is_contiguous()
    if count:
        grid = (-(-vocab // (COUNTS_PER_THREAD * FEW_THREADS)), count, 1)
        arguments = (*_where(logits), rows, slots, settings, counts, width)
        _kernels()["penalise"](grid, FEW_THREADS, arguments, pdl=True)


def count_tokens(counts: Tensor, slots: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """As `ref.count_tokens`."""
    count = len(rows)
    assert rows.dtype is slots.dtype is torch.int32 and slots.shape == (count,) and tokens.dtype is torch.int64
    if count:
        grid = (-(-count // FEW_THREADS), 1, 1)
        arguments = counts, _count_width(counts), count, slots, rows, tokens
        _kernels()["count_tokens"](grid, FEW_THREADS, arguments, pdl=True)


def _count_width(counts: Tensor) -> int:
    assert counts.dtype is torch.int16 and counts.is_contiguous() and counts.shape[1] % COUNTS_PER_THREAD == 0
    return counts.shape[1]


def _rows(logits: Tensor) -> int:
    assert logits.dtype is torch.float32 and logits.dim() == 2 and logits.stride(1) == 1
    assert logits.shape[1] <= MOST_VOCAB
    return len(logits)


def _where(logits: Tensor) -> tuple[Tensor, int, int]:
    return logits, logits.stride(0), logits.shape[1]


def _scores(rows: int, top_n: int, device: torch.device) -> Scores:
    def values(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def whole(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    return values(rows), whole(rows, top_n), values(rows, top_n), whole(rows)


@cache
def module() -> Module:
    return Module(FILE, VARIANTS)


@cache
def _kernels() -> dict[str, Kernel]:
    return {name: module().kernel(name) for name in VARIANTS}
