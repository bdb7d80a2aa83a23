"""Filters: which records of the log a page is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """Both ends belong to it; None is open. A record without the figure is in no span."""

    least: int | None = None
    most: int | None = None

    @property
    def is_open(self) -> bool:
        return self.least is None and self.most is None


@dataclass(frozen=True, slots=True)
class Filters:
    """All that are given must hold; of a tuple, one. An empty gateway: those of the whole account."""

    account: str
    gateway: str = ""
    since: int | None = None  # ms, itself included
    until: int | None = None  # ms, itself not
    success: bool | None = None
    cached: bool | None = None
    rescued: bool | None = None  # answered by a later step
    status: tuple[int, ...] = ()
    provider: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    request_type: tuple[str, ...] = ()
    key_id: tuple[str, ...] = ()
    user: tuple[str, ...] = ()
    event_id: tuple[str, ...] = ()
    session_id: tuple[str, ...] = ()
    id: tuple[str, ...] = ()
    error: tuple[str, ...] = ()
    feedback: tuple[int, ...] = ()
    micros: Span = Span()
    tokens_in: Span = Span()
    tokens_out: Span = Span()
    duration_ms: Span = Span()
    metadata: Mapping[str, str] = field(default_factory=dict)  # values as text: true, 1.5
