"""Ops on single logits and tokens of each row.

`ops` exports them; `gpu` computes on a GPU, torch elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels import ref


def edit_logits(logits: Tensor, rows: Tensor, ids: Tensor, divide: Tensor, add: Tensor) -> None:
    """Divide positive logits by `divide`, multiply others by it, then add `add`, in place.

    Each (row, id) may occur only once.
    """
    if logits.is_cuda:
        from emberline.kernels import gpu

        gpu.edit_logits(logits, rows, ids, divide, add)
    else:
        ref.edit_logits(logits, rows, ids, divide, add)


def apply_penalties(logits: Tensor, rows: Tensor, slots: Tensor, penalties: Tensor, counts: Tensor) -> None:
    """Apply the penalties for tokens that occurred to `logits`.

    `ref.apply_penalties` defines the arguments.
    """
    if logits.is_cuda:
        from emberline.kernels import gpu

        gpu.apply_penalties(logits, rows, slots, penalties, counts)
    else:
        ref.apply_penalties(logits, rows, slots, penalties, counts)


def count_tokens(counts: Tensor, slots: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Add one occurrence of tokens[rows[i]] to counts[slots[i]]. Each slot may occur only once."""
    if counts.is_cuda:
        from emberline.kernels import gpu

        gpu.count_tokens(counts, slots, rows, tokens)
    else:
        ref.count_tokens(counts, slots, rows, tokens)


def fill_newest_tokens(tokens: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
    """Return the tokens, each negative one replaced by the newest token of its row."""
    if tokens.is_cuda:
        from emberline.kernels import gpu

        return gpu.fill_newest_tokens(tokens, rows, newest)
    return torch.where(tokens < 0, newest[rows], tokens)
