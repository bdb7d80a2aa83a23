"""Server-sent events: the bytes of one event, built once."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"  # how the OpenAI protocols end a stream

_ENCODER = msgspec.json.Encoder()  # not orjson: it refuses integers beyond 64 bits, which replies may repeat


def dumps(payload: Any) -> bytes:
    """JSON as every reply carries it, streamed or not."""
    return _ENCODER.encode(payload)


def data(payload: Any) -> bytes:
    return b"data: %b\n\n" % _ENCODER.encode(payload)


def event(name: str, payload: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _ENCODER.encode(payload))
