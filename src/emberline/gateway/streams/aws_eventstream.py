"""Parses application/vnd.amazon.eventstream.

A message consists of the message's length, the headers' length, a checksum of both lengths, the headers, the payload,
and a checksum of all bytes before it.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from emberline.gateway.core.errors import UpstreamBroken

CONTENT_TYPE = "application/vnd.amazon.eventstream"
MAX_MESSAGE_BYTES = 24 << 20
_PRELUDE = struct.Struct(">III")
_CHECKSUM = struct.Struct(">I")
_VALUE_SIZES = {2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}  # header value type -> bytes; types 0 and 1 have no value
_BYTES, _TEXT = 6, 7


class EventStreamMessage(NamedTuple):
    headers: dict[str, str]  # string headers only
    payload: bytes

    @property
    def event_type(self) -> str:
        return self.headers.get(":event-type", "")

    @property
    def exception_type(self) -> str:
        """The exception type or error code in the message's headers, or "" if the message is an event."""
        if self.headers.get(":message-type") == "event":
            return ""
        return self.headers.get(":exception-type") or self.headers.get(":error-code") or "error"


class EventStreamParser:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._partial = b""

    def push(self, data: bytes) -> list[EventStreamMessage]:
        """Add `data` and return the messages that are now complete; raise UpstreamBroken for a damaged one."""
        data = self._partial + data if self._partial else data
        messages, start = [], 0
        while len(data) - start >= _PRELUDE.size:
            size, headers, check = _PRELUDE.unpack_from(data, start)
            if zlib.crc32(data[start : start + 8]) != check:
                raise UpstreamBroken("a message of the AWS event stream is damaged: wrong checksum of its prelude")
            if size > MAX_MESSAGE_BYTES or headers + 16 > size:
                raise UpstreamBroken(
                    f"an AWS event stream message has invalid lengths: message {size} bytes, headers {headers} bytes"
                )
            if len(data) - start < size:
                break
            messages.append(_parse_message(data[start : start + size], headers))
            start += size
        self._partial = data[start:]
        return messages

    def end(self) -> None:
        if self._partial:
            raise UpstreamBroken("the AWS event stream ended within a message")


def _parse_message(data: bytes, headers_size: int) -> EventStreamMessage:
    if zlib.crc32(data[:-4]) != _CHECKSUM.unpack_from(data, len(data) - 4)[0]:
        raise UpstreamBroken("a message of the AWS event stream is damaged: wrong checksum")
    try:
        return EventStreamMessage(_parse_headers(data[12 : 12 + headers_size]), data[12 + headers_size : -4])
    except (IndexError, KeyError, UnicodeDecodeError) as e:
        raise UpstreamBroken("a message of the AWS event stream has malformed headers") from e


def _parse_headers(data: bytes) -> dict[str, str]:
    headers, position = {}, 0
    while position < len(data):
        name = data[position + 1 : position + 1 + data[position]].decode()
        position += 1 + data[position]
        kind, position = data[position], position + 1
        if kind in (_BYTES, _TEXT):
            size = data[position] << 8 | data[position + 1]
            position += 2
            if kind == _TEXT:
                headers[name] = data[position : position + size].decode()
            position += size
        elif kind > 1:
            position += _VALUE_SIZES[kind]
    if position != len(data):
        raise IndexError
    return headers


def encode_message(headers: dict[str, str], payload: bytes) -> bytes:
    """Return the bytes of a message, for fake providers and tests."""
    header_bytes = b"".join(
        struct.pack(">B", len(name)) + name.encode() + struct.pack(">BH", _TEXT, len(value.encode())) + value.encode()
        for name, value in headers.items()
    )
    lengths = struct.pack(">II", 16 + len(header_bytes) + len(payload), len(header_bytes))
    data = lengths + _CHECKSUM.pack(zlib.crc32(lengths)) + header_bytes + payload
    return data + _CHECKSUM.pack(zlib.crc32(data))
