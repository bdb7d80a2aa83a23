"""Commands of the leader in the ring of plans: messages other than the work of a step.

The work of a step is a MessagePack array; commands begin with bytes that no array begins with. This module does not
import torch."""

from __future__ import annotations

import msgspec

# Kernels of matrix products: rows, columns, depth, kind, choice. See kernels/tuning.py.
ProductChoices = list[tuple[int, int, int, str, int]]

# MessagePack strings.
PREPARE_NEXT, RUN_UNCAPTURED = b"\xa7prepare", b"\xaauncaptured"
SLEEP, WAKE = b"\xa5sleep", b"\xa4wake"
KERNEL_CHOICES_MESSAGE_TAG = b"\xc2"  # MessagePack's false, with which no other message begins

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ProductChoices)


def encode_products(products: ProductChoices) -> bytes:
    """Return a message after which ranks use exactly these kernels for matrix products."""
    return KERNEL_CHOICES_MESSAGE_TAG + _ENCODER.encode(products)


def decode_products(message: bytes) -> ProductChoices | None:
    """Return the kernels in a message; None: it is another message."""
    return (
        _DECODER.decode(message[len(KERNEL_CHOICES_MESSAGE_TAG) :])
        if message.startswith(KERNEL_CHOICES_MESSAGE_TAG)
        else None
    )
