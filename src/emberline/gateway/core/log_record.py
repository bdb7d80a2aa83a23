"""LogRecord: one row of the request log. Its id begins with the time, so ids sort by time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Literal

import msgspec

from emberline.wire.usage import Usage

EndState = Literal["complete", "cut", "error", "left"]
MetadataValue = str | int | float | bool


def new_record_id(ms: int) -> str:
    """Return an id of 48 bits of time and 80 random bits, in hex."""
    return f"{ms:012x}{os.urandom(10).hex()}"


def created_ms(id: str) -> int:
    """Return the time in an id, in milliseconds since 1970."""
    return int(id[:12], 16)


def day_of(ms: int) -> date:
    return datetime.fromtimestamp(ms / 1000, UTC).date()


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # of new_record_id; has the time of creation
    account: str
    gateway: str
    provider: str
    model: str
    path: str = ""  # endpoint, after the provider
    dialect: str = "raw"
    request_type: str = ""  # chat, embeddings, ...
    status: int
    success: bool  # the whole reply was sent; implies a status below 400
    ended: EndState = "complete"
    cached: bool = False
    stream: bool = False
    step: int = 0  # index of the step that answered
    attempts: int = 1
    usage: Usage = Usage()
    estimated: bool = False  # the gateway counted `usage`, not the provider
    micros: int | None = None  # cost in micro-dollars; None: the price is unknown
    custom_cost: bool = False
    duration_ms: int = 0
    first_byte_ms: int | None = None
    error: str = ""  # error code
    key_id: str = ""
    user: str = ""
    metadata: Mapping[str, MetadataValue] = {}
    event_id: str = ""  # set by the client
    session_id: str = ""
    request_content_type: str = ""
    response_content_type: str = ""
    feedback: int | None = None  # 1 or -1
    score: int | None = None

    def __post_init__(self) -> None:
        assert len(self.id) == 32 and not (self.success and self.status >= 400)

    @property
    def answered_by_fallback(self) -> bool:
        """Return whether a fallback answered because an earlier step failed."""
        return self.success and self.step > 0

    @property
    def created_ms(self) -> int:
        """Return the time of creation in milliseconds since 1970."""
        return created_ms(self.id)


class LogPayload(msgspec.Struct, frozen=True):
    """Body of the request and of the response, as received. Stored apart from the records, compressed."""

    request: bytes
    response: bytes

    def __len__(self) -> int:
        return len(self.request) + len(self.response)
