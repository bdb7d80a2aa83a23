"""LogRecord: one row of the request log. Its id begins with the time, so ids sort by time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Literal

import msgspec

from emberline.wire.usage import Usage

EndState = Literal["complete", "cut", "error", "left"]
MetadataValue = str | int | float | bool


def parse_created_ms(record_id: str) -> int:
    """Return the creation time contained in a record id, in milliseconds since 1970."""
    return int(record_id[:12], 16)


def utc_day(time_ms: int) -> date:
    return datetime.fromtimestamp(time_ms / 1000, UTC).date()


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # of RequestIDGenerator; 32 hexadecimal digits that begin with the time
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
    message: str = ""  # error message, of the provider if it rejected the request
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
        """Return whether a fallback model answered because an earlier provider failed."""
        return self.success and self.step > 0

    @property
    def created_ms(self) -> int:
        """Return the time of creation in milliseconds since 1970."""
        return parse_created_ms(self.id)


class LogPayload(msgspec.Struct, frozen=True):
    """The bodies of the request and the response, as received.

    They are stored compressed and apart from the records.
    """

    request: bytes
    response: bytes

    def __len__(self) -> int:
        return len(self.request) + len(self.response)
