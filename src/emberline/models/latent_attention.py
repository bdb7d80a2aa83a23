"""LatentAttention: multi-head latent attention (MLA), including norm and residual.

Keys and values of all heads are products of one latent per token. The cache has only the latent and the rotated part of
the keys, as one KV head. Instead of computing keys, the matrix that gives keys is applied to the queries, and the
matrix that gives values to what the queries attend to. Each head has its own pair of these matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels import ops
from emberline.models.attention import PositionTables, make_attention_layer
from emberline.models.attention_parts import LatentConfig
from emberline.models.config import ModelConfig
from emberline.models.forward import ForwardBatch
from emberline.models.layers import OutputScaling, add_output, load_linear
from emberline.models.weights import Weights

RANK_NORM_EPS = 1e-6  # of the norms of compressed queries and latents, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True)
class LatentAttention:
    qkv: ops.LinearLayer  # queries, compressed or not, then the latent, then the elements of the keys that are rotated
    q_up: ops.LinearLayer | None  # queries from compressed queries
    latent_norm: Tensor
    key_products: tuple[ops.LinearLayer, ...]  # of each head: from queries of keys to queries of latents
    value_products: tuple[ops.LinearLayer, ...]  # of each head: from latents to values
    o: ops.LinearLayer
    layer: ops.AttentionLayer
    sizes: LatentConfig
    scaling: OutputScaling | None = None

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, tables: PositionTables) -> LatentAttention:
        at, sizes, heads = f"model.layers.{layer}.self_attn", config.parts.attention.latent, config.heads
        assert sizes is not None
        q = heads * (sizes.plain_dim + sizes.rotary_dim)
        first = (f"{at}.q_a_proj", sizes.q_rank) if sizes.q_rank else (f"{at}.q_proj", q)
        q_up = None
        if sizes.q_rank:
            norm = f"{at}.q_a_layernorm"
            q_up = load_linear(weights, [(f"{at}.q_b_proj", q)], sizes.q_rank, norm=norm, eps=RANK_NORM_EPS)
        rows = heads * (sizes.plain_dim + sizes.value_dim)
        pairs = weights.load_matrix(f"{at}.kv_b_proj.weight", rows, sizes.kv_rank).view(heads, -1, sizes.kv_rank)
        return LatentAttention(
            qkv=load_linear(
                weights,
                [first, (f"{at}.kv_a_proj_with_mqa", sizes.cached_dim)],
                config.hidden,
                norm=f"model.layers.{layer}.input_layernorm",
                eps=config.norm_eps,
            ),
            q_up=q_up,
            latent_norm=weights.load_vector(f"{at}.kv_a_layernorm.weight", sizes.kv_rank),
            key_products=tuple(ops.LinearLayer(weights.pack(pair[: sizes.plain_dim].T)) for pair in pairs),
            value_products=tuple(ops.LinearLayer(weights.pack(pair[sizes.plain_dim :])) for pair in pairs),
            o=load_linear(weights, [(f"{at}.o_proj", config.hidden)], heads * sizes.value_dim),
            layer=make_attention_layer(config, layer, tables.cos_sin),
            sizes=sizes,
        )

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: Tensor | None = None
    ) -> Tensor:
        """Add the attention's output to x in place and return x, or a new tensor with only `rows` if given.

        The latents of all rows of x are written to the cache in both cases.
        """
        mixed = self.mix(x, keys, values, batch, rows)
        x = x if rows is None else x[rows]
        return add_output(mixed, self.o, x, self.scaling, batch.unpacker) if len(x) else x

    def mix(self, x: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: Tensor | None) -> Tensor:
        """Cache the latents of x, and return the values that each row, or each of `rows`, attends to."""
        qkv = self._project(x, batch.unpacker)
        ops.rope_and_cache(qkv, self.layer, keys, values, batch.attention)
        if rows is not None and not len(rows):
            return qkv[:0, : len(self.value_products) * self.sizes.value_dim]
        latents = ops.paged_attention(qkv, self.layer, keys, values, batch.attention, batch.plan)
        latents = latents if rows is None else latents[rows]
        heads = latents.view(len(latents), -1, self.sizes.kv_rank).unbind(1)
        products = zip(heads, self.value_products, strict=True)
        return torch.cat([ops.linear(head.contiguous(), product) for head, product in products], dim=1)

    def _project(self, x: Tensor, unpacker: ops.WeightUnpacker | None) -> Tensor:
        """Return queries and keys of latents, each with its rotated elements first."""
        sizes, heads = self.sizes, len(self.key_products)
        projected = ops.linear(x, self.qkv, unpacker=unpacker)
        q, latent, rotary = projected.split(
            [projected.shape[1] - sizes.cached_dim, sizes.kv_rank, sizes.rotary_dim], dim=1
        )
        if self.q_up is not None:
            q = ops.linear(q.contiguous(), self.q_up, unpacker=unpacker)
        q = q.reshape(len(x), heads, sizes.plain_dim + sizes.rotary_dim)
        qkv = x.new_empty(len(x), heads + 1, sizes.cached_dim)
        for head, product in enumerate(self.key_products):
            qkv[:, head, sizes.rotary_dim :] = ops.linear(q[:, head, : sizes.plain_dim].contiguous(), product)
        qkv[:, :heads, : sizes.rotary_dim] = q[:, :, sizes.plain_dim :]
        qkv[:, heads, : sizes.rotary_dim] = rotary
        ops.rms_norm(latent, self.latent_norm, RANK_NORM_EPS, qkv[:, heads, sizes.rotary_dim :])
        return qkv.flatten(1)
