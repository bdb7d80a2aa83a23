"""Sampling ops over rows of logits on a GPU, with the results that `kernels/reference.py` defines.

`sample.cu` has the kernels.

A row's result depends on that row only, bit for bit. All functions can be captured into a CUDA graph if `out` is given:
they neither wait for the device nor allocate memory.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule
from emberline.kernels.sampling_arguments import LogProbs, SamplingTensors

FILE = "sample.cu"
VARIANTS = ("sample", "log_probs", "apply_bitmask", "edit_logits", "apply_penalties", "count_tokens")
ROW_THREADS = 1024  # threads that share a row
ELEMENT_THREADS = 256  # threads of a CTA where each works on elements of its own
MAX_VOCAB = (1 << 20) - 1  # ids have 20 bits, so that the sum of all weights fits into 64
MAX_TOP_LOGPROBS = 64
COUNTS_PER_THREAD = 8


def sample(
    logits: Tensor, settings: SamplingTensors, seed: Tensor, position: Tensor, out: Tensor, *, pdl: bool = True
) -> Tensor:
    """Write one sampled id per row into `out` and return it. The logits stay unchanged.

    Each row's random number in [0, 1) is derived from its seed and position. NaN counts as -inf. If a row's largest
    logit is not finite, the first id with that logit is returned.
    """
    rows = _check_logits(logits)
    temperature, top_k, top_p, min_p = settings
    expected = (temperature, torch.float32), (top_p, torch.float32), (min_p, torch.float32), (top_k, torch.int32)
    for tensor, dtype in (*expected, (position, torch.int32), (seed, torch.int64), (out, torch.int64)):
        assert tensor.dtype is dtype and tensor.shape == (rows,) and tensor.is_contiguous()
    if rows:
        arguments = (*_address_and_shape(logits), *settings, seed, position, out)
        _get_kernels()["sample"]((rows, 1, 1), ROW_THREADS, arguments, pdl=pdl)
    return out


def log_probs(logits: Tensor, ids: Tensor, top_n: int, *, out: LogProbs | None = None) -> LogProbs:
    """Return the result that `OpBackend.log_probs` describes, written to `out` if given."""
    rows = _check_logits(logits)
    assert ids.dtype is torch.int64 and ids.shape == (rows,) and ids.is_contiguous()
    assert 0 <= top_n <= min(MAX_TOP_LOGPROBS, logits.shape[1])
    out = _allocate_log_probs(rows, top_n, logits.device) if out is None else out
    if rows:
        _get_kernels()["log_probs"](
            (rows, 1, 1), ROW_THREADS, (*_address_and_shape(logits), ids, top_n, *out), pdl=True
        )
    return out


def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Set logits[rows[i], t] to -inf wherever bit t of mask[i] (little-endian int32 words) is 0."""
    _check_logits(logits)
    count, words = mask.shape
    assert mask.dtype is torch.int32 and mask.is_contiguous() and 32 * words >= logits.shape[1]
    assert rows.dtype is torch.int64 and rows.shape == (count,) and rows.is_contiguous()
    if count:
        grid = (-(-logits.shape[1] // ELEMENT_THREADS), count, 1)
        _get_kernels()["apply_bitmask"](
            grid, ELEMENT_THREADS, (*_address_and_shape(logits), mask, words, rows), pdl=True
        )


def edit_logits(logits: Tensor, rows: Tensor, ids: Tensor, divide: Tensor, add: Tensor) -> None:
    """Scale single logits, logits[rows[i], ids[i]], by divide[i], then add add[i].

    Scaling divides a positive logit and multiplies any other. Each (row, id) may occur only once. Row -1 is padding.
    """
    _check_logits(logits)
    count = len(rows)
    for tensor, dtype in ((rows, torch.int32), (ids, torch.int32), (divide, torch.float32), (add, torch.float32)):
        assert tensor.dtype is dtype and tensor.shape == (count,) and tensor.is_contiguous()
    if count:
        grid = (-(-count // ELEMENT_THREADS), 1, 1)
        arguments = logits, logits.stride(0), count, rows, ids, divide, add
        _get_kernels()["edit_logits"](grid, ELEMENT_THREADS, arguments, pdl=True)


def apply_penalties(logits: Tensor, rows: Tensor, slots: Tensor, penalties: Tensor, counts: Tensor) -> None:
    """Apply penalties as `OpBackend.apply_penalties` describes.

    The width of `counts` must be a multiple of 8 and at least the vocabulary.
    """
    _check_logits(logits)
    vocab, count = logits.shape[1], len(rows)
    width = _check_counts_width(counts)
    assert width >= vocab and rows.dtype is slots.dtype is torch.int32 and penalties.dtype is torch.float32
    assert slots.shape == (count,) and penalties.shape == (count, 3) and penalties.is_contiguous()
    if count:
        grid = (-(-vocab // (COUNTS_PER_THREAD * ELEMENT_THREADS)), count, 1)
        arguments = (*_address_and_shape(logits), rows, slots, penalties, counts, width)
        _get_kernels()["apply_penalties"](grid, ELEMENT_THREADS, arguments, pdl=True)


def count_tokens(counts: Tensor, slots: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Count tokens as `OpBackend.count_tokens` describes."""
    count = len(rows)
    assert rows.dtype is slots.dtype is torch.int32 and slots.shape == (count,) and tokens.dtype is torch.int64
    if count:
        grid = (-(-count // ELEMENT_THREADS), 1, 1)
        arguments = counts, _check_counts_width(counts), count, slots, rows, tokens
        _get_kernels()["count_tokens"](grid, ELEMENT_THREADS, arguments, pdl=True)


def _check_counts_width(counts: Tensor) -> int:
    assert counts.dtype is torch.int16 and counts.is_contiguous() and counts.shape[1] % COUNTS_PER_THREAD == 0
    return counts.shape[1]


def _check_logits(logits: Tensor) -> int:
    assert logits.dtype is torch.float32 and logits.dim() == 2 and logits.stride(1) == 1
    assert logits.shape[1] <= MAX_VOCAB
    return len(logits)


def _address_and_shape(logits: Tensor) -> tuple[Tensor, int, int]:
    return logits, logits.stride(0), logits.shape[1]


def _allocate_log_probs(rows: int, top_n: int, device: torch.device) -> LogProbs:
    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    return LogProbs(floats(rows), integers(rows, top_n), floats(rows, top_n), integers(rows))


@cache
def get_module() -> CudaModule:
    return CudaModule(FILE, VARIANTS)


def list_modules() -> list[CudaModule]:
    return [get_module()]


@cache
def _get_kernels() -> dict[str, CudaKernel]:
    return {name: get_module().kernel(name) for name in VARIANTS}
