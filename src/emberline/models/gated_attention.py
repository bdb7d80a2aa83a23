"""GatedAttention: attention whose output is multiplied by the sigmoid of a gate, including norm and residual.

The query projection has the rows of a head's query, then those of its gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emberline.kernels import ops
from emberline.models.attention import Attention, PositionTables, make_attention_layer
from emberline.models.config import ModelConfig
from emberline.models.forward import ForwardBatch
from emberline.models.layers import OutputScaling, add_output, load_linear
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class GatedAttention:
    attention: Attention
    gate: ops.LinearLayer

    @property
    def qkv(self) -> ops.LinearLayer:
        return self.attention.qkv

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, tables: PositionTables) -> GatedAttention:
        return GatedAttention.load_from(config, weights, layer, tables, f"model.layers.{layer}")

    @staticmethod
    def load_from(config: ModelConfig, weights: Weights, layer: int, tables: PositionTables, at: str) -> GatedAttention:
        """Load the attention of a layer. `at`: how the names of the layer's tensors begin."""
        dim, offset = config.head_dim, config.parts.norm_offset
        q, kv = config.heads * dim, config.kv_heads * dim
        norm = weights.load_vector(f"{at}.input_layernorm.weight", config.hidden, offset=offset)
        names = [(f"{at}.self_attn.{name}", rows) for name, rows in (("q_proj", 2 * q), ("k_proj", kv), ("v_proj", kv))]

        def reorder(rows: Tensor) -> Tensor:
            """Return the rows of queries, keys and values, then those of gates."""
            both = rows[: 2 * q].unflatten(0, (config.heads, 2, dim))
            return torch.cat([both[:, 0].flatten(0, 1), rows[2 * q :], both[:, 1].flatten(0, 1)])

        sizes, bias = [q + 2 * kv, q], None
        matrices = weights.load_rearranged_linears(
            [(f"{name}.weight", rows) for name, rows in names], config.hidden, reorder, sizes
        )
        if config.qkv_bias:
            bias = weights.stack_vectors([(f"{name}.bias", rows) for name, rows in names])
            bias = weights.transform(bias, reorder)

        biases = [None, None] if bias is None else bias.split(sizes)
        linears = [
            ops.LinearLayer(matrix, bias, norm, config.norm_eps) for matrix, bias in zip(matrices, biases, strict=True)
        ]
        q_norm, k_norm = (
            weights.load_vector(f"{at}.self_attn.{name}.weight", dim, offset=offset) for name in ("q_norm", "k_norm")
        )
        attention = Attention(
            qkv=linears[0],
            o=load_linear(weights, [(f"{at}.self_attn.o_proj", config.hidden)], q, bias=config.o_bias),
            layer=replace(make_attention_layer(config, layer, tables.cos_sin), q_norm=q_norm, k_norm=k_norm),
            scaling=OutputScaling.load(config, weights, weights.attention_comm),
        )
        return GatedAttention(attention, linears[1])

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: Tensor | None = None
    ) -> Tensor:
        """Add the attention's output to x in place and return x, or a new tensor with only `rows` if given.

        Keys and values of all rows of x are written to the cache in both cases.
        """
        mixed = self.attention.compute_attention(x, keys, values, batch, rows)
        x = x if rows is None else x[rows]
        if not len(x):
            return x
        gated = ops.apply_sigmoid_gate(mixed, ops.linear(x, self.gate, unpacker=batch.unpacker))
        return add_output(gated, self.attention.o, x, self.attention.scaling, batch.unpacker)
