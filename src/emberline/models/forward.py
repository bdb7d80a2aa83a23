"""Forward: all the tensors of one step, built by engine/batch.py alone. It is the one argument of a model's forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from emberline.kernels import ops


@dataclass(frozen=True, slots=True)
class Forward:
    """B requests with T new tokens between them; those of request b are rows [query_start[b], query_start[b + 1])."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int64: where each token's key and value go, block * block_size + offset
    query_start: Tensor  # [B + 1] int32
    context: Tensor  # [B] int32: tokens in the cache before this step
    block_tables: Tensor  # [B, most blocks] int32, padded with 0
    logit_rows: Tensor | None  # [S] int64: rows of [0, T) whose logits are wanted; None: all
    keys: Tensor  # [layers, blocks, kv_heads, block_size, head_dim]: the cache, written in place
    values: Tensor
    tiles: ops.Tiles | None = None  # how attention is cut up, where the device wants to be told
    ahead: ops.Ahead | None = None  # where packed weights become plain rows, on a device that keeps them packed
