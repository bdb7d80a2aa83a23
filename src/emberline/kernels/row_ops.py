"""Ops on single logits and tokens of rows, by `gpu` on a GPU and else by torch; called through `ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels import ref


def edit(logits: Tensor, rows: Tensor, ids: Tensor, divide: Tensor, add: Tensor) -> None:
    """Changes single logits: divided if positive and multiplied if not, then added to. Each (row, id) comes once."""
    if logits.is_cuda:
        from emberline.kernels import gpu

        gpu.edit(logits, rows, ids, divide, add)
    else:
        ref.edit(logits, rows, ids, divide, add)


def penalise(logits: Tensor, rows: Tensor, slots: Tensor, settings: Tensor, counts: Tensor) -> None:
    """Applies penalties for the tokens that occurred; `ref.penalise` defines the arguments."""
    if logits.is_cuda:
        from emberline.kernels import gpu

        gpu.penalise(logits, rows, slots, settings, counts)
    else:
        ref.penalise(logits, rows, slots, settings, counts)


def count_tokens(counts: Tensor, slots: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Adds one occurrence of tokens[rows[i]] to counts[slots[i]]. Each slot comes once."""
    if counts.is_cuda:
        from emberline.kernels import gpu

        gpu.count_tokens(counts, slots, rows, tokens)
    else:
        ref.count_tokens(counts, slots, rows, tokens)


def newest_tokens(tokens: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
    """The tokens, where negative ones stand for the newest of their row."""
    if tokens.is_cuda:
        from emberline.kernels import gpu

        return gpu.newest_tokens(tokens, rows, newest)
    return torch.where(tokens < 0, newest[rows], tokens)
