"""ChainedLayer: a decoder layer that can compute its matrix products, from the output projection on, in one op.

The op includes the product for the queries, keys and values of the next layer. It fetches the weights of each product
while the one before it ends, so that reads of memory never pause.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from emberline.kernels.arguments import LayerProducts
from emberline.kernels.layer_ops import run_layer_products
from emberline.models.attention import Attention
from emberline.models.ffn import FeedForward
from emberline.models.forward import ForwardBatch
from emberline.models.layers import add_output


@dataclass(frozen=True, slots=True)
class ChainedLayer:
    attention: Attention
    ffn: FeedForward

    @staticmethod
    def make_if_supported(attention: object, ffn: object) -> ChainedLayer | None:
        """Return the layer with these parts, or None if the op does not support what they compute."""
        if not isinstance(attention, Attention) or not isinstance(ffn, FeedForward):
            return None
        if attention.scaling is not None or ffn.scaling is not None or ffn.activation != "silu":
            return None
        has_norms = attention.qkv.norm is not None and ffn.gate_up.norm is not None
        return ChainedLayer(attention, ffn) if has_norms else None

    def run(
        self,
        x: Tensor,
        qkv: Tensor | None,
        keys: Tensor,
        values: Tensor,
        batch: ForwardBatch,
        rows: Tensor | None,
        following: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output for x, or for `rows` of x only, and the qkv of the layer `following`.

        The second result is None if the next layer must compute its queries, keys and values itself. x is overwritten.
        `qkv`: the queries, keys and values of this layer; None: computed here."""
        mixed = self.attention.compute_attention(x, keys, values, batch, rows, qkv=qkv)
        if rows is None and isinstance(following, ChainedLayer) and len(x):
            products = LayerProducts(self.attention.o, self.ffn.gate_up, self.ffn.down, following.attention.qkv)
            if (found := run_layer_products(mixed, x, products)) is not None:
                return x, found
        x = x if rows is None else x[rows]
        x = add_output(mixed, self.attention.o, x, None, batch.unpacker) if len(x) else x
        del mixed  # so that its memory is free for the feed-forward network
        return (self.ffn(x, batch.unpacker) if len(x) else x), None
