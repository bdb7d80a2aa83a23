"""stack_layers: combines the gateway's layers into one handler.

A layer is a function that takes a handler and returns a handler. For a request that a layer does not change, the layer
returns the coroutine of the inner handler, which is cheaper than awaiting it in a second coroutine.
"""

from __future__ import annotations

from collections.abc import Sequence

from emberline.gateway.core.request import Handler, Layer


def stack_layers(layers: Sequence[Layer], innermost: Handler) -> Handler:
    """Return one handler in which the first layer is the outermost."""
    handler = innermost
    for layer in reversed(layers):
        handler = layer(handler)
    return handler
