"""Attention: grouped-query attention over the paged KV cache, including norm and residual."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.forward import ForwardBatch
from emberline.models.layers import load_linear
from emberline.models.weights import Weights


def make_attention_layer(config: ModelConfig, layer: int, cos_sin: Tensor) -> ops.AttentionLayer:
    """Return the shape and the rotary embedding of a layer's attention, without norms of queries and keys."""
    return ops.AttentionLayer(
        q_heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=float(config.head_dim**-0.5),
        cos_sin=cos_sin,
        window=config.windows[layer],
        eps=config.norm_eps,
    )


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: ops.LinearLayer
    o: ops.LinearLayer
    layer: ops.AttentionLayer

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, cos_sin: Tensor) -> Attention:
        at, dim = f"model.layers.{layer}", config.head_dim
        q, kv = config.heads * dim, config.kv_heads * dim
        names = [(f"{at}.self_attn.q_proj", q), (f"{at}.self_attn.k_proj", kv), (f"{at}.self_attn.v_proj", kv)]
        norm, eps = f"{at}.input_layernorm", config.norm_eps
        return Attention(
            qkv=load_linear(weights, names, config.hidden, bias=config.qkv_bias, norm=norm, eps=eps),
            o=load_linear(weights, [(f"{at}.self_attn.o_proj", config.hidden)], q, bias=config.o_bias),
            layer=replace(
                make_attention_layer(config, layer, cos_sin),
                q_norm=weights.load_vector(f"{at}.self_attn.q_norm.weight", dim) if config.qk_norm else None,
                k_norm=weights.load_vector(f"{at}.self_attn.k_norm.weight", dim) if config.qk_norm else None,
            ),
        )

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: Tensor | None = None
    ) -> Tensor:
        """Add the attention's output to x in place and return x, or a new tensor with only `rows` if given.

        Keys and values of all rows of x are written to the cache in both cases.
        """
        qkv = ops.linear(x, self.qkv, unpacker=batch.unpacker)
        ops.rope_and_cache(qkv, self.layer, keys, values, batch.attention)
        if rows is not None and not len(rows):
            return x[:0]
        plan = batch.plan if rows is None or batch.plan is None else batch.plan.for_last_layer()
        mixed = ops.paged_attention(qkv, self.layer, keys, values, batch.attention, plan)
        if rows is not None:
            x, mixed = x[rows], mixed[rows]
        return ops.linear(mixed, self.o, add_to=x, unpacker=batch.unpacker)
