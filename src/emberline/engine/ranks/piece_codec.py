"""PieceRequest: a message in the ring of plans that asks ranks with GPUs to copy their parts of a KV transfer's piece.

A piece is some layers of some blocks. Its parts pass through a slot, a buffer that all ranks share. A slot begins with
a header: one word for each rank, in which the rank writes the number of the request when its part is copied. This
module does not import torch.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from emberline.kv.transfer.piece import TransferPiece

PIECE_MESSAGE_TAG = b"\xc4"  # begins a binary string in MessagePack, which no other message is
FAILED = 1 << 63  # set in a rank's word, beside the number of the request, if its part could not be copied
HEADER_ALIGNMENT = 64


class RankPieceRequest(msgspec.Struct, array_like=True):
    """What one rank copies: a piece of its own cache, to or from the bytes [begin, end) after the slot's header."""

    rank: int
    layers: tuple[int, int]
    blocks: tuple[int, int]
    begin: int
    end: int

    @property
    def piece(self) -> TransferPiece:
        return TransferPiece(*self.layers, *self.blocks)


class PieceRequest(msgspec.Struct, array_like=True):
    number: int
    slot: int
    is_scatter: bool  # whether parts are copied to the caches; otherwise from them
    wire_tokens: int  # tokens per block of the sender
    blocks: bytes  # numbers of the blocks of the transfer, as 64-bit integers
    parts: list[RankPieceRequest]

    @property
    def block_ids(self) -> NDArray[np.int64]:
        return np.frombuffer(self.blocks, np.int64).copy()  # torch warns of arrays that cannot be written


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PieceRequest)


def is_piece_request(message: bytes) -> bool:
    return message.startswith(PIECE_MESSAGE_TAG)


def encode_piece_request(request: PieceRequest) -> bytes:
    return PIECE_MESSAGE_TAG + _ENCODER.encode(request)


def decode_piece_request(message: bytes) -> PieceRequest:
    return _DECODER.decode(message[len(PIECE_MESSAGE_TAG) :])


def header_bytes(num_ranks: int) -> int:
    return -(-8 * num_ranks // HEADER_ALIGNMENT) * HEADER_ALIGNMENT


def view_words(slot: memoryview, num_ranks: int) -> NDArray[np.uint64]:
    """Return the header of a slot: for each rank, the number of the last request that it has completed."""
    return np.frombuffer(slot, np.uint64, num_ranks)
