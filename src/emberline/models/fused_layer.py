"""FusedLayer: a decoder layer on several GPUs whose all-reduces also compute the norms that follow them.

One kernel sums the ranks' outputs, adds them to the residual, and computes the norm of the result for the next matrix
product (`all_reduce_add_norm`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.models.attention import Attention
from emberline.models.ffn import FeedForward
from emberline.models.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class FusedLayer:
    attention: Attention
    ffn: FeedForward
    comm: Communicator

    @staticmethod
    def make_if_supported(attention: object, ffn: object) -> FusedLayer | None:
        """Return the layer with these parts, or None if its all-reduces cannot compute the following norms.

        Both parts must begin with a norm and end with an all-reduce without other scaling, and the group of ranks must
        have a kernel that computes a sum and a norm."""
        if not isinstance(attention, Attention) or not isinstance(ffn, FeedForward):
            return None
        scalings = [each for each in (attention.scaling, ffn.scaling) if each is not None and each.sums_only]
        comm = scalings[0].comm if len(scalings) == 2 else None
        if comm is None or not comm.fuses_norm or attention.o.bias is not None:
            return None
        if attention.qkv.norm is None or ffn.gate_up.norm is None:
            return None
        return FusedLayer(attention, ffn, comm)

    def run(
        self,
        x: Tensor,
        normed: Tensor | None,
        keys: Tensor,
        values: Tensor,
        batch: ForwardBatch,
        rows: Tensor | None,
        following: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output for x, or for `rows` of x only, and the normed input of the next layer.

        `following`: the next layer. The second result is None if that layer must compute its norm itself. x is
        overwritten.
        `normed`: x after this layer's input norm; None: computed here."""
        attention, ffn, unpacker = self.attention, self.ffn, batch.unpacker
        mixed = attention.compute_attention(x, keys, values, batch, rows, normed)
        x = x if rows is None else x[rows]
        if not len(x):
            return x, None
        attended = ops.linear(mixed, attention.o, unpacker=unpacker)
        del mixed  # so that its memory is free for the feed-forward network
        inputs = self._add_and_norm(x, attended, ffn.gate_up)
        del attended
        partial = ops.linear(
            ffn.compute_inner(inputs, replace(ffn.gate_up, norm=None), unpacker), ffn.down, unpacker=unpacker
        )
        if not isinstance(following, FusedLayer):
            return self.comm.all_reduce_add(x, partial), None
        return x, self._add_and_norm(x, partial, following.attention.qkv)

    def _add_and_norm(self, x: Tensor, partial: Tensor, product: ops.LinearLayer) -> Tensor:
        """Add the sum of all ranks' `partial` to x in place, and return x after the norm of the next product."""
        assert product.norm is not None
        return self.comm.all_reduce_add_norm(x, partial, product.norm, product.eps)
