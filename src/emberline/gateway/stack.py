"""The stack: one handler out of layers. Each takes a handler and gives one; the first of the list is the outermost. A
layer with nothing to do for a call returns the inner one's coroutine, which costs less than one of its own."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.gateway.call import Handler, Layer


def stacked(layers: Sequence[Layer], innermost: Handler) -> Handler:
    handler = innermost
    for layer in reversed(layers):
        handler = layer(handler)
    return handler
