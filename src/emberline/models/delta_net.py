"""DeltaNet: a recurrent layer with the gated delta rule in place of attention, including norm and residual.

A sequence has a state of fixed size in each such layer, and no keys and values. Queries, keys and values pass a short
convolution first. The output is normed, and multiplied by the silu of a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels import ops
from emberline.models.attention import PositionTables
from emberline.models.config import ModelConfig
from emberline.models.forward import ForwardBatch
from emberline.models.layers import OutputScaling, add_output, load_linear
from emberline.models.outline import StateSizes
from emberline.models.weights import StackSource, Weights


@dataclass(frozen=True, slots=True)
class DeltaNet:
    qkv: ops.LinearLayer  # queries, keys, values, gates; then step size and decay time per value head
    norm: Tensor  # of each head's output
    eps: float
    o: ops.LinearLayer
    layer: ops.DeltaLayer
    scaling: OutputScaling | None = None

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, tables: PositionTables) -> DeltaNet:
        at, sizes, hidden = f"model.layers.{layer}.linear_attn", config.parts.attention.state, config.hidden
        assert sizes is not None
        norm = f"model.layers.{layer}.input_layernorm.weight"
        is_grouped = config.parts.attention.has_grouped_delta_tensors
        (matrix,) = (_load_grouped if is_grouped else _load_separate)(weights, at, sizes, hidden)
        taps, channels = sizes.conv_kernel, sizes.conv_channels
        kernel = StackSource(f"{at}.conv1d.weight", (channels, 1, taps), lambda whole: whole.T[:, None])
        return DeltaNet(
            qkv=ops.LinearLayer(
                matrix,
                norm=weights.load_vector(norm, hidden, offset=config.parts.norm_offset),
                eps=config.norm_eps,
            ),
            norm=weights.load_vector(f"{at}.norm.weight", sizes.value_dim),
            eps=config.norm_eps,
            o=load_linear(weights, [(f"{at}.out_proj", hidden)], sizes.value_heads * sizes.value_dim),
            layer=ops.DeltaLayer(
                key_heads=sizes.key_heads,
                value_heads=sizes.value_heads,
                key_dim=sizes.key_dim,
                value_dim=sizes.value_dim,
                conv_weight=weights.stack_experts((taps, channels), [kernel], torch.float32),
                rates=weights.transform(weights.load_vector(f"{at}.A_log", sizes.value_heads), torch.exp),
                time_bias=weights.load_vector(f"{at}.dt_bias", sizes.value_heads),
            ),
            scaling=OutputScaling.load(config, weights, weights.attention_comm),
        )

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: Tensor | None = None
    ) -> Tensor:
        """Add the layer's output to x in place and return x, or a new tensor with only `rows` if given.

        `keys` and `values` are the layer's states: `keys` the last inputs of the convolution, `values` the matrices of
        the delta rule. Both are updated with all rows of x, also if `rows` is given.
        """
        rows_of_attention = len(batch.attention.query_start) - 1
        assert batch.state_slots is not None and len(batch.state_slots) == rows_of_attention, "a row has no states"
        few, layer = 0 if batch.plan is None else batch.plan.decode_rows, self.layer
        saves, drafts = batch.state_saves, batch.state_drafts
        sequences = batch.attention if batch.state_sequences is None else batch.state_sequences
        states = ops.LayerStates(keys, values, batch.state_slots, sequences, saves, drafts, few)
        projected = ops.linear(x, self.qkv, unpacker=batch.unpacker)
        qkv, gate, steps, times = projected.split(
            [layer.channels, layer.values, layer.value_heads, layer.value_heads], dim=1
        )
        mixed = ops.compute_delta_rule(ops.convolve(qkv, layer, states), ops.DeltaGates(steps, times), layer, states)
        if rows is not None:
            x, mixed, gate = x[rows], mixed[rows], gate[rows]
        if not len(x):
            return x
        gated = ops.norm_and_gate(mixed, gate, self.norm, self.eps)
        return add_output(gated, self.o, x, self.scaling, batch.unpacker)


def _load_separate(weights: Weights, at: str, sizes: StateSizes, hidden: int) -> list[ops.PackedWeight]:
    """Return the input projections of Qwen3.5 as one matrix, in a list."""
    values, heads = sizes.value_heads * sizes.value_dim, sizes.value_heads
    names = {"in_proj_qkv": sizes.conv_channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    parts = [(f"{at}.{name}.weight", rows) for name, rows in names.items()]
    return weights.load_rearranged_linears(parts, hidden, lambda matrix: matrix, [sum(names.values())])


def _load_grouped(weights: Weights, at: str, sizes: StateSizes, hidden: int) -> list[ops.PackedWeight]:
    """Return the input projections of Qwen3-Next as one matrix, in a list.

    The checkpoint stores them by key head. The first tensor has, for each key head, its query, its key, and the values
    and gates of its value heads. The second tensor has the step sizes and decay times of these value heads.
    """
    per_key = sizes.value_heads // sizes.key_heads
    values = per_key * sizes.value_dim
    large = [sizes.key_dim, sizes.key_dim, values, values]
    names = [(f"{at}.in_proj_qkvz.weight", sizes.key_heads * sum(large))]
    names.append((f"{at}.in_proj_ba.weight", 2 * sizes.value_heads))

    def reorder(matrix: Tensor) -> Tensor:
        wide, narrow = (part.view(sizes.key_heads, -1, hidden) for part in matrix.split([rows for _, rows in names]))
        parts = [*wide.split(large, dim=1), *narrow.split(per_key, dim=1)]
        return torch.cat([part.reshape(-1, hidden) for part in parts])

    return weights.load_rearranged_linears(names, hidden, reorder, [sum(rows for _, rows in names)])
