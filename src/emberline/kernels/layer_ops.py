"""run_layer_products: the products of a decoder layer as one op, on devices that have a kernel for all of them."""

from __future__ import annotations

from torch import Tensor

from emberline.kernels.arguments import LayerProducts
from emberline.kernels.backend import backend_of


def run_layer_products(mixed: Tensor, x: Tensor, products: LayerProducts) -> Tensor | None:
    """Add the outputs of attention and of the feed-forward network to x in place, and return the queries, keys and
    values of the next layer; or change nothing and return None: there is no kernel for these weights or as many rows.

    `mixed`: the values that the rows attend to."""
    return backend_of(x).run_layer_products(mixed, x, products)
