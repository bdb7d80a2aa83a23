"""stack_layers: combines the gateway's layers into one handler.

A layer is a function from a handler to a handler. A layer that has nothing to do for a request returns the coroutine of
the inner handler, which costs less than a coroutine of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from emberline.gateway.core.request import Handler, Layer


def stack_layers(layers: Sequence[Layer], innermost: Handler) -> Handler:
    """Return one handler: the first layer is the outermost."""
    handler = innermost
    for layer in reversed(layers):
        handler = layer(handler)
    return handler
