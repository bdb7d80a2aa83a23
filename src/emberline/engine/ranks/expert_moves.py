"""Messages in the ring of plans that let ranks move experts. This module does not import torch."""

from __future__ import annotations

import msgspec

from emberline.models.expert_placement import Placement

MOVES_MESSAGE_TAG = b"\xc0"  # encoded work, which is a MessagePack array, does not begin with this byte

ExpertMoves = dict[int, Placement]  # by layer

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ExpertMoves)


def encode_moves(moves: ExpertMoves) -> bytes:
    return MOVES_MESSAGE_TAG + _ENCODER.encode(moves)


def decode_moves(message: bytes) -> ExpertMoves | None:
    """Return the placements of a message; None: it is another message, such as the work of a step."""
    return _DECODER.decode(message[len(MOVES_MESSAGE_TAG) :]) if message.startswith(MOVES_MESSAGE_TAG) else None
