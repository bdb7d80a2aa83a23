"""Copies of KV blocks between the ranks' caches and shared host buffers, as messages in the ring of plans.

They have messages of their own, because a step may have copies and no work. This module does not import torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

from emberline.core.plan import BlockCopy

COPIES_MESSAGE_TAG = b"\xc1"  # MessagePack does not use this byte, so no encoded work begins with it


class EncodedCopies(msgspec.Struct, array_like=True):
    """Copies as columns of 64-bit integers: block, number of the buffer, group of layers, and the rank with the block.

    Saves come first."""

    num_saves: int
    columns: bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EncodedCopies)


def is_copies(message: bytes) -> bool:
    """Return whether a message of the ring has copies of KV blocks."""
    return message.startswith(COPIES_MESSAGE_TAG)


def encode_copies(
    saves: Sequence[BlockCopy], loads: Sequence[BlockCopy], buffer_number: Callable[[memoryview], int]
) -> bytes:
    """Return the message for these copies. `buffer_number`: returns a buffer's number, which is equal on all ranks."""
    copies = [*saves, *loads]
    columns = array("q", [each.block for each in copies])
    columns.extend(buffer_number(each.buffer) for each in copies)
    columns.extend(each.group for each in copies)
    columns.extend(each.dp_rank for each in copies)
    return COPIES_MESSAGE_TAG + _ENCODER.encode(EncodedCopies(len(saves), columns.tobytes()))


def decode_copies(message: bytes, find_buffer: Callable[[int], memoryview]) -> tuple[list[BlockCopy], list[BlockCopy]]:
    """Return the saves and the loads of a message, with empty block hashes.

    `find_buffer`: returns the buffer with this number."""
    encoded = _DECODER.decode(message[len(COPIES_MESSAGE_TAG) :])
    columns = array("q", encoded.columns).tolist()
    count = len(columns) // 4
    rows = zip(*(columns[i * count : (i + 1) * count] for i in range(4)), strict=True)
    copies = [BlockCopy(block, b"", find_buffer(number), group, dp_rank) for block, number, group, dp_rank in rows]
    return copies[: encoded.num_saves], copies[encoded.num_saves :]
