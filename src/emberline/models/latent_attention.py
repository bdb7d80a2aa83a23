"""LatentAttention: multi-head latent attention (MLA), including norm and residual.

Keys and values of all heads are computed from one latent per token. The cache has only the latent and the rotated part
of the keys, as one KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.models.attention import PositionTables, make_attention_layer
from emberline.models.config import ModelConfig
from emberline.models.forward import ForwardBatch
from emberline.models.layers import OutputScaling, add_output, load_linear
from emberline.models.weights import Weights

RANK_NORM_EPS = 1e-6  # of the norms of compressed queries and latents, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True)
class LatentAttention:
    qkv: ops.LinearLayer  # queries, compressed or not, then the latent, then the elements of the keys that are rotated
    q_up: ops.LinearLayer | None  # queries from compressed queries
    latent: ops.LatentLayer
    o: ops.LinearLayer
    scaling: OutputScaling | None = None
    comm: Communicator | None = None  # of ranks that have parts of the compressed queries and of the latent

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int, tables: PositionTables) -> LatentAttention:
        at, sizes, heads = f"model.layers.{layer}.self_attn", config.parts.attention.latent, config.heads
        assert sizes is not None
        q = heads * (sizes.plain_dim + sizes.rotary_dim)
        parts = sizes.down_parts
        first = (f"{at}.q_a_proj", sizes.q_rank // parts) if sizes.q_rank else (f"{at}.q_proj", q)
        q_up = None
        if sizes.q_rank:
            norm = f"{at}.q_a_layernorm"
            q_up = load_linear(weights, [(f"{at}.q_b_proj", q)], sizes.q_rank, norm=norm, eps=RANK_NORM_EPS)
        rows = heads * (sizes.plain_dim + sizes.value_dim)
        pairs = weights.load_matrix(f"{at}.kv_b_proj.weight", rows, sizes.kv_rank)
        return LatentAttention(
            qkv=load_linear(
                weights,
                [first, (f"{at}.kv_a_proj_with_mqa", sizes.cached_dim // parts)],
                config.hidden,
                norm=f"model.layers.{layer}.input_layernorm",
                eps=config.norm_eps,
            ),
            q_up=q_up,
            latent=ops.LatentLayer(
                make_attention_layer(config, layer, tables.cos_sin),
                norm=weights.load_vector(f"{at}.kv_a_layernorm.weight", sizes.kv_rank),
                eps=RANK_NORM_EPS,
                plain_dim=sizes.plain_dim,
                value_dim=sizes.value_dim,
                products=weights.pack_latent_products(pairs, heads, sizes.plain_dim),
            ),
            o=load_linear(weights, [(f"{at}.o_proj", config.hidden)], heads * sizes.value_dim),
            scaling=OutputScaling.load(config, weights, weights.attention_comm),
            comm=weights.attention_comm if parts > 1 else None,
        )

    @property
    def layer(self) -> ops.AttentionLayer:
        return self.latent.attention

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: Tensor | None = None
    ) -> Tensor:
        """Add the attention's output to x in place and return x, or a new tensor with only `rows` if given.

        The latents of all rows of x are written to the cache in both cases.
        """
        mixed = self.compute_attention(x, keys, batch, rows)
        x = x if rows is None else x[rows]
        return add_output(mixed, self.o, x, self.scaling, batch.unpacker) if len(x) else x

    def compute_attention(self, x: Tensor, keys: Tensor, batch: ForwardBatch, rows: Tensor | None) -> Tensor:
        """Write the latents of x to the cache; return attention's output before the output projection.

        `rows`: the rows of x whose output is returned; None: all."""
        q, kv = self._project(x, batch)
        if self.q_up is not None:
            q = ops.linear(q, self.q_up, unpacker=batch.unpacker)
        q = q.unflatten(1, (self.layer.q_heads, -1))
        return ops.latent_attention(ops.LatentInputs(q, kv, self.latent, keys, batch.attention), batch.plan, rows)

    def _project(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return the queries, compressed if `q_up` exists, and the latents with the part of the keys to be rotated."""
        projected, cached = ops.linear(x, self.qkv, unpacker=batch.unpacker), self.layer.head_dim
        if self.comm is None:
            q, kv = projected.tensor_split([projected.shape[1] - cached], dim=1)
            return q, kv
        ranks = self.comm.size
        q, kv = projected.tensor_split([projected.shape[1] - cached // ranks], dim=1)
        if self.q_up is None:
            return q, self.comm.all_gather(kv.contiguous())
        gathered = self.comm.all_gather(projected).unflatten(1, (ranks, -1))
        q, kv = gathered.tensor_split([q.shape[1]], dim=2)
        return q.flatten(1), kv.flatten(1)
