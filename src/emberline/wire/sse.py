"""Encodes server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

DONE_EVENT = b"data: [DONE]\n\n"  # ends a stream of the OpenAI protocols

_ENCODER = msgspec.json.Encoder()  # not orjson, which rejects integers above 64 bits: replies may repeat such values


def dumps(payload: Any) -> bytes:
    """Return the JSON bytes of a reply or of an event's data."""
    return _ENCODER.encode(payload)


def encode_data_event(payload: Any) -> bytes:
    return b"data: %b\n\n" % _ENCODER.encode(payload)


def encode_named_event(name: str, payload: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _ENCODER.encode(payload))
