"""Meters an AWS event stream that is passed on unchanged."""

from __future__ import annotations

import base64
import binascii
from typing import Any, ClassVar

import msgspec

from emberline.gateway.errors import Broken
from emberline.gateway.streams.eventstream import KIND, EventStream, Message
from emberline.gateway.streams.gauges import usage_within
from emberline.gateway.streams.meter import RawMeter
from emberline.net.notjson import NOT_JSON


class EventStreamMeter(RawMeter):
    kind: ClassVar[str] = KIND

    def __init__(self) -> None:
        super().__init__()
        self._stream = EventStream()

    def push(self, data: bytes) -> bytes:
        try:
            for message in self._stream.push(data):
                self._see(message)
        except Broken as e:
            self.broken = e
        return super().push(data)

    def _see(self, message: Message) -> None:
        if message.exception:
            self.signs.failed = f"{message.exception}: {message.payload[:300].decode('utf-8', 'replace')}"
        self.signs.counted(usage_within(_unwrapped(message.payload)))

    def end(self) -> None:
        try:
            self._stream.end()
        except Broken as e:
            self.broken = e
        super().end()


def _unwrapped(payload: bytes) -> Any:
    """Return the payload's JSON, or the model's JSON wrapped in it; None if it cannot be decoded."""
    try:
        data = msgspec.json.decode(payload)
        if isinstance(data, dict) and isinstance(data.get("bytes"), str):
            return msgspec.json.decode(base64.b64decode(data["bytes"]))
        return data
    except (*NOT_JSON, binascii.Error):
        return None
