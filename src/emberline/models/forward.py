"""ForwardBatch: all tensors of one step, the argument of a model's forward. Built by engine/batch.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from emberline.kernels import ops


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """B requests with T new tokens in total; those of request b are rows [query_start[b], query_start[b + 1])."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int64: cache slot of each token's key and value, block * block_size + offset
    query_start: Tensor  # [B + 1] int32
    context: Tensor  # [B] int32: tokens in the cache before this step
    block_tables: Tensor  # [B, max blocks] int32, padded with 0
    logit_rows: Tensor | None  # [S] int64: rows of [0, T) whose logits are computed; None: all
    keys: Tensor  # [layers, blocks, kv_heads, block_size, head_dim]: the cache, written in place
    values: Tensor
    tiles: ops.AttentionPlan | None = None  # division of the attention into tiles, for a GPU
    unpacker: ops.WeightUnpacker | None = None  # state for unpacking weights, on a device that keeps them packed
