"""ChainedLayer: a decoder layer whose products, up to the queries, keys and values of the next layer, may be one op.

So weights are read without a pause: the op fetches those of a product while the product before it ends.
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
    def of(attention: object, ffn: object) -> ChainedLayer | None:
        """Return the layer with these parts, or None if something is computed between its products."""
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
        """Return the layer's output for x, which is overwritten, or for `rows` of x; and the queries, keys and values
        of the layer `following`, if they were computed.

        `qkv`: those of this layer; None: they are computed here."""
        mixed = self.attention.mix(x, keys, values, batch, rows, qkv=qkv)
        if rows is None and isinstance(following, ChainedLayer) and len(x):
            products = LayerProducts(self.attention.o, self.ffn.gate_up, self.ffn.down, following.attention.qkv)
            if (found := run_layer_products(mixed, x, products)) is not None:
                return x, found
        x = x if rows is None else x[rows]
        x = add_output(mixed, self.attention.o, x, None, batch.unpacker) if len(x) else x
        del mixed  # so that its memory is free for the feed-forward network
        return (self.ffn(x, batch.unpacker) if len(x) else x), None
