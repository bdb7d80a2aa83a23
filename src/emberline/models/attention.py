"""Attention: grouped-query attention over the paged KV cache, including norm and residual.

What differs from Llama follows `config.parts`: norms of the whole query and key projections, caps of the scores, norms
and multipliers of the output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.models.config import ModelConfig
from emberline.models.forward import ForwardBatch
from emberline.models.layers import OutputScaling, add_output, load_linear
from emberline.models.ropeconfig import RopeConfig
from emberline.models.weight_matrices import is_attention_faster_unpacked
from emberline.models.weights import Weights


class PositionTables(NamedTuple):
    """What attention multiplies queries and keys by, according to their positions."""

    cos_sin: Tensor  # [positions, rotary dimensions]
    query_scales: Tensor | None = None  # [positions] float32: factors of queries


def make_attention_layer(config: ModelConfig, layer: int, cos_sin: Tensor) -> ops.AttentionLayer:
    """Return the shape and the rotary embedding of a layer's attention, without norms of queries and keys."""
    return ops.AttentionLayer(
        q_heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=float(config.head_dim**-0.5) if config.parts.attention_scale is None else config.parts.attention_scale,
        cos_sin=cos_sin,
        window=config.windows[layer],
        eps=config.norm_eps,
        softcap=config.parts.attention_softcap,
        interleaved=config.parts.interleaved_rope,
        chunked=config.parts.attention.chunked_windows and config.windows[layer] > 0,
        latent_dim=0 if config.parts.attention.latent is None else config.parts.attention.latent.kv_rank,
    )


def _with_weightless_norms(
    layer: ops.AttentionLayer, rope: RopeConfig | None, device: torch.device
) -> ops.AttentionLayer:
    """Return the layer with a weightless RMS norm of its rotated query and key heads; unchanged if `rope` is None.

    Kernels apply norms before the rotation, but this norm follows it. A rotation of the whole head multiplies its
    length by the attention factor only. So a norm before it gives the same result with weights of 1 / factor and
    epsilon / factor^2.
    """
    if rope is None:
        return layer
    assert rope.dim == layer.head_dim
    factor = rope.attention_factor
    weight = torch.full((layer.head_dim,), 1 / factor, dtype=torch.float32, device=device)
    return replace(layer, q_norm=weight, k_norm=weight, eps=layer.eps / factor**2)


@dataclass(frozen=True, slots=True)
class ProjectionNorms:
    """Norms of the query and key projections that `rope_and_cache` does not compute.

    They are RMS norms of a whole projection, or layer norms of each head.
    """

    q: Tensor
    k: Tensor
    eps: float
    is_layer_norm: bool
    comm: Communicator | None = None  # of ranks that have parts of the projections

    @staticmethod
    def load(config: ModelConfig, weights: Weights, at: str) -> ProjectionNorms:
        q, k = f"{at}.self_attn.q_norm.weight", f"{at}.self_attn.k_norm.weight"
        dim, is_layer_norm = config.head_dim, config.parts.qk_norm_kind == "head_layer"
        sizes = [(config.heads, dim), (config.kv_heads, dim)]
        shapes = sizes if is_layer_norm else [(heads * dim,) for heads, dim in sizes]
        comm = None if is_layer_norm else weights.attention_comm
        return ProjectionNorms(
            weights.load_vector(q, *shapes[0]), weights.load_vector(k, *shapes[1]), config.norm_eps, is_layer_norm, comm
        )

    def apply(self, qkv: Tensor) -> None:
        """Apply the norms to the queries and keys inside `qkv`, in place."""
        if self.comm is not None:
            self._apply_to_parts(qkv, self.comm)
            return
        start, norm = 0, ops.layer_norm if self.is_layer_norm else ops.rms_norm
        for weight in (self.q, self.k):
            part = qkv[:, start : start + weight.numel()]
            norm(part, weight, self.eps, part)
            start += weight.numel()

    def _apply_to_parts(self, qkv: Tensor, comm: Communicator) -> None:
        """Apply the norms to this rank's part of the queries and keys, with the sums of squares of all ranks.

        A KV head that is replicated on several ranks counts once per rank, in the sum and in the number of elements."""
        columns = [self.q.numel(), self.k.numel()]
        parts = qkv[:, : sum(columns)].split(columns, dim=1)
        squares = comm.all_reduce(torch.stack([part.float().square().sum(1) for part in parts], dim=1))
        for part, weight, total in zip(parts, (self.q, self.k), squares.unbind(1), strict=True):
            scale = torch.rsqrt(total / (weight.numel() * comm.size) + self.eps)
            part.copy_(part.float() * scale[:, None] * weight)


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: ops.LinearLayer
    o: ops.LinearLayer
    layer: ops.AttentionLayer
    norms: ProjectionNorms | None = None
    query_scales: Tensor | None = None
    scaling: OutputScaling | None = None

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, tables: PositionTables) -> Attention:
        at, dim, parts = f"model.layers.{layer}", config.head_dim, config.parts
        q, kv = config.heads * dim, config.kv_heads * dim
        names = [(f"{at}.self_attn.q_proj", q), (f"{at}.self_attn.k_proj", kv), (f"{at}.self_attn.v_proj", kv)]
        names = [(f"{at}.{parts.qkv_tensor}", q + 2 * kv)] if parts.qkv_tensor else names
        norm = f"{at}.input_layernorm" if parts.norms in ("pre", "both") else None
        eps, offset = config.norm_eps, parts.norm_offset
        attention = make_attention_layer(config, layer, tables.cos_sin)
        if config.qk_norm and parts.qk_norm_kind == "head":
            q_norm, k_norm = (
                weights.load_vector(f"{at}.self_attn.{name}.weight", dim, offset=offset)
                for name in ("q_norm", "k_norm")
            )
            attention = replace(attention, q_norm=q_norm, k_norm=k_norm)
        if parts.attention.has_weightless_qk_norm:
            attention = _with_weightless_norms(attention, config.layer_rope(layer), weights.device)
        if parts.attention.has_sinks:
            attention = replace(attention, sinks=weights.load_vector(f"{at}.self_attn.sinks", config.heads))
        has_experts = config.experts is not None
        has_own_norms = config.qk_norm and parts.qk_norm_kind != "head"
        return Attention(
            qkv=load_linear(
                weights,
                names,
                config.hidden,
                bias=config.qkv_bias,
                norm=norm,
                eps=eps,
                norm_offset=offset,
                packable=not is_attention_faster_unpacked((q + 2 * kv) * config.hidden, has_experts=has_experts),
            ),
            o=load_linear(
                weights,
                [(f"{at}.self_attn.o_proj", config.hidden)],
                q,
                bias=config.o_bias,
                packable=not is_attention_faster_unpacked(q * config.hidden, has_experts=has_experts),
            ),
            layer=attention,
            norms=ProjectionNorms.load(config, weights, at) if has_own_norms else None,
            query_scales=tables.query_scales,
            scaling=OutputScaling.load(
                config, weights, weights.attention_comm, f"{at}.post_attention_layernorm.weight"
            ),
        )

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: Tensor | None = None
    ) -> Tensor:
        """Add the attention's output to x in place and return x, or a new tensor with only `rows` if given.

        Keys and values of all rows of x are written to the cache in both cases.
        """
        mixed = self.compute_attention(x, keys, values, batch, rows)
        x = x if rows is None else x[rows]
        return add_output(mixed, self.o, x, self.scaling, batch.unpacker) if len(x) else x

    def compute_attention(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: ForwardBatch,
        rows: Tensor | None,
        normed: Tensor | None = None,
        *,
        qkv: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values of x to the cache; return attention's output before the output projection.

        `rows`: the rows of x whose output is returned; None: all. `normed`: x after the input norm. `qkv`: queries,
        keys and values of x. The last two are computed here if None."""
        if qkv is None:
            inputs, product = (x, self.qkv) if normed is None else (normed, replace(self.qkv, norm=None))
            qkv = ops.linear(inputs, product, unpacker=batch.unpacker)
        if self.norms is not None:
            self.norms.apply(qkv)
        ops.rope_and_cache(qkv, self.layer, keys, values, batch.attention)
        if self.query_scales is not None:
            scales = self.query_scales.index_select(0, batch.attention.positions)
            qkv[:, : self.layer.q_heads * self.layer.head_dim].mul_(scales[:, None])
        if rows is not None and not len(rows):
            return qkv[:0, : self.layer.q_heads * self.layer.head_dim]
        plan = batch.plan if rows is None or batch.plan is None else batch.plan.for_last_layer()
        mixed = ops.paged_attention(qkv, self.layer, keys, values, batch.attention, plan)
        return mixed if rows is None else mixed[rows]
