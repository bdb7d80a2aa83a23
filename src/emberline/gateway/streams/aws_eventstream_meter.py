"""Meters an AWS event stream that is passed on unchanged."""

from __future__ import annotations

import base64
import binascii
from typing import Any, ClassVar

import msgspec

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.streams.aws_eventstream import CONTENT_TYPE, EventStreamMessage, EventStreamParser
from emberline.gateway.streams.event_observers import find_usage
from emberline.gateway.streams.meter import RawReplyMeter
from emberline.net.json_errors import JSON_DECODE_ERRORS


class EventStreamMeter(RawReplyMeter):
    content_type: ClassVar[str] = CONTENT_TYPE

    def __init__(self) -> None:
        super().__init__()
        self._stream = EventStreamParser()

    def push(self, data: bytes) -> bytes:
        try:
            for message in self._stream.push(data):
                self._observe_message(message)
        except UpstreamBroken as e:
            self.broken = e
        return super().push(data)

    def _observe_message(self, message: EventStreamMessage) -> None:
        if message.exception_type:
            self.state.error = f"{message.exception_type}: {message.payload[:300].decode('utf-8', 'replace')}"
        self.state.add_usage(find_usage(_unwrap_payload(message.payload)))

    def end(self) -> None:
        try:
            self._stream.end()
        except UpstreamBroken as e:
            self.broken = e
        super().end()


def _unwrap_payload(payload: bytes) -> Any:
    """Return the decoded payload, or None if it is not valid JSON. A reply in its field `bytes` is unwrapped."""
    try:
        data = msgspec.json.decode(payload)
        if isinstance(data, dict) and isinstance(data.get("bytes"), str):
            return msgspec.json.decode(base64.b64decode(data["bytes"]))
        return data
    except (*JSON_DECODE_ERRORS, binascii.Error):
        return None
