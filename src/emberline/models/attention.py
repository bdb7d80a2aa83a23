"""Attention: grouped-query attention over the paged KV cache, including norm and residual."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.forward import ForwardBatch
from emberline.models.layers import Linear, load_linear
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: Linear
    o: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    cos_sin: Tensor
    window: int
    heads: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, cos_sin: Tensor) -> Attention:
        at, dim = f"model.layers.{layer}", config.head_dim
        q, kv = config.heads * dim, config.kv_heads * dim
        names = [(f"{at}.self_attn.q_proj", q), (f"{at}.self_attn.k_proj", kv), (f"{at}.self_attn.v_proj", kv)]
        norm, eps = f"{at}.input_layernorm", config.norm_eps
        return Attention(
            qkv=load_linear(weights, names, config.hidden, bias=config.qkv_bias, norm=norm, eps=eps),
            o=load_linear(weights, [(f"{at}.self_attn.o_proj", config.hidden)], q, bias=config.o_bias),
            q_norm=weights.vector(f"{at}.self_attn.q_norm.weight", dim) if config.qk_norm else None,
            k_norm=weights.vector(f"{at}.self_attn.k_norm.weight", dim) if config.qk_norm else None,
            eps=eps,
            cos_sin=cos_sin,
            window=config.windows[layer],
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=dim,
        )

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor, f: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """Add the attention's output to x in place; with `rows`, return only those rows, in a new tensor.

        Keys and values of all rows are written to the cache.
        """
        heads = self.heads, self.kv_heads, self.head_dim
        qkv = self.qkv(x, unpacker=f.unpacker)
        q_norm, k_norm = self.q_norm, self.k_norm
        ops.rope_and_cache(
            qkv, f.positions, self.cos_sin, keys, values, f.slots, *heads, q_norm=q_norm, k_norm=k_norm, eps=self.eps
        )
        if rows is not None and not len(rows):
            return x[:0]
        tiles = f.tiles if rows is None or f.tiles is None else f.tiles.for_last_layer()
        mixed = ops.paged_attention(
            qkv, keys, values, f.block_tables, f.query_start, f.context, self.scale, *heads,
            window=self.window, plan=tiles,
        )  # fmt: skip
        if rows is not None:
            x, mixed = x[rows], mixed[rows]
        return self.o(mixed, add_to=x, unpacker=f.unpacker)
