"""Record: one row of the log. Its id begins with the time, so ids sort as the rows were made and tell their day."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Literal

import msgspec

from emberline.gateway.costs.usage import Usage

Ended = Literal["complete", "cut", "error", "left"]
Scalar = str | int | float | bool


def new_id(ms: int) -> str:
    """48 bits of time and 80 of chance, in hex."""
    return f"{ms:012x}{os.urandom(10).hex()}"


def created(id: str) -> int:
    return int(id[:12], 16)


def day_of(ms: int) -> date:
    return datetime.fromtimestamp(ms / 1000, UTC).date()


class Record(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # of new_id: `created` is in it
    account: str
    gateway: str
    provider: str
    model: str
    path: str = ""  # after the provider
    dialect: str = "raw"
    request_type: str = ""  # chat, embeddings, ...
    status: int
    success: bool  # answered as asked, whole; implies a status below 400
    ended: Ended = "complete"
    cached: bool = False
    stream: bool = False
    step: int = 0  # of a fallback chain: which one answered
    attempts: int = 1
    usage: Usage = Usage()
    estimated: bool = False  # usage was counted by us, not told by the provider
    micros: int | None = None  # None: the price is not known
    custom_cost: bool = False
    duration_ms: int = 0
    first_byte_ms: int | None = None
    error: str = ""  # its code
    key_id: str = ""
    user: str = ""
    metadata: Mapping[str, Scalar] = {}
    event_id: str = ""  # only if the client set one
    session_id: str = ""
    request_content_type: str = ""
    response_content_type: str = ""
    feedback: int | None = None  # 1 or -1
    score: int | None = None

    def __post_init__(self) -> None:
        assert len(self.id) == 32 and not (self.success and self.status >= 400)

    @property
    def rescued(self) -> bool:
        """A fallback answered: somebody in front of it could not."""
        return self.success and self.step > 0

    @property
    def created(self) -> int:
        """Milliseconds since 1970."""
        return created(self.id)


class Payload(msgspec.Struct, frozen=True):
    """What was asked and answered, as it was on the wire. Kept apart from rows, compressed, or not at all."""

    request: bytes
    response: bytes

    def __len__(self) -> int:
        return len(self.request) + len(self.response)
