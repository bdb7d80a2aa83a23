"""take_slot, split_by_layers: for KV transfers that copy pieces of blocks through a few buffers of limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from emberline.kv.transfer.errors import BadTransfer, TransferTimeout
from emberline.kv.transfer.piece import TransferPiece

SlotT = TypeVar("SlotT")


@contextmanager
def take_slot(
    slots: SimpleQueue[SlotT], kind: str, timeout_s: float, is_usable: Callable[[SlotT], bool] = lambda slot: True
) -> Iterator[SlotT]:
    """Return a context with a slot that no other thread uses. Raises TransferTimeout if none becomes free in time.

    `kind`: what the error calls a slot. A slot that is not usable when the context exits is never used again."""
    try:
        slot = slots.get(timeout=timeout_s)
    except Empty:
        raise TransferTimeout(f"no {kind} for KV transfers became free within {timeout_s:g} s") from None
    try:
        yield slot
    finally:
        if is_usable(slot):
            slots.put(slot)


def split_by_layers(
    piece: TransferPiece, layer_bytes: int, slot_bytes: int, data: memoryview
) -> Iterator[tuple[TransferPiece, memoryview]]:
    """Split a piece into groups of layers that fit into a slot, and yield each with its bytes of `data`.

    `layer_bytes`: bytes of one layer of the piece. Raises BadTransfer if a single layer does not fit into a slot."""
    if layer_bytes > slot_bytes:
        raise BadTransfer(f"one layer of the transfer {piece} has {layer_bytes} bytes; the limit is {slot_bytes}")
    step = slot_bytes // layer_bytes
    for first in range(piece.first_layer, piece.end_layer, step):
        some = replace(piece, first_layer=first, end_layer=min(first + step, piece.end_layer))
        begin, end = ((layer - piece.first_layer) * layer_bytes for layer in (first, some.end_layer))
        yield some, data[begin:end]
