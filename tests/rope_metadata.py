"""rope_metadata: the attention metadata that the rotary kernels need."""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels.arguments import AttentionMetadata


def rope_metadata(positions: Tensor, slots: Tensor) -> AttentionMetadata:
    """Return metadata with the fields that `rope_and_cache` reads; the others are empty."""
    none = torch.empty(0, device=slots.device)
    return AttentionMetadata(positions, slots, query_start=none, context=none, block_tables=none)
