"""run_layer_products: the products of a decoder layer as one op, on devices that have a kernel for all of them."""

from __future__ import annotations

from torch import Tensor

from emberline.kernels.arguments import LayerProducts
from emberline.kernels.backend import backend_of


def run_layer_products(mixed: Tensor, x: Tensor, products: LayerProducts) -> Tensor | None:
    """Compute a layer's products after its attention, and return the queries, keys and values of the next layer.

    The outputs of attention and of the feed-forward network are added to x in place. If no kernel supports these
    weights or this number of rows, x is unchanged and the result is None. `mixed`: the result of attention, to which
    the output projection is applied."""
    return backend_of(x).run_layer_products(mixed, x, products)
