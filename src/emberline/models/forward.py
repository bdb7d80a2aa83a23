"""ForwardBatch: all input tensors of one forward pass, the argument of `DecoderModel.forward`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from emberline.kernels import ops


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The T new tokens of all requests of a forward pass, and the KV cache that it reads and writes."""

    tokens: Tensor  # [T] int64
    attention: ops.AttentionMetadata  # which rows belong to which request, and where they are cached
    logit_rows: Tensor | None  # [S] int64: rows of [0, T) whose logits are computed; None: all
    keys: Tensor  # [layers, blocks, kv_heads, block_size, head_dim]: the cache, written in place
    values: Tensor
    plan: ops.AttentionPlan | None = None  # how the attention is split into work for a GPU
    unpacker: ops.WeightUnpacker | None = None  # state for unpacking weights, on a device that keeps them packed
