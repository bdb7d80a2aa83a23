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
class Unlike:
    """Records whose field has none of these values."""

    field: str  # of Filters
    values: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Containing:
    """Records of which one of these fields contains one of these texts; the case of ASCII letters does not matter."""

    fields: tuple[str, ...]  # of Filters, with text in them
    texts: tuple[str, ...]


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
    request_content_type: tuple[str, ...] = ()
    response_content_type: tuple[str, ...] = ()
    feedback: tuple[int, ...] = ()
    micros: Span = Span()
    tokens_in: Span = Span()
    tokens_out: Span = Span()
    tokens: Span = Span()  # in and out together
    duration_ms: Span = Span()
    unlike: tuple[Unlike, ...] = ()
    containing: tuple[Containing, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)  # values as text: true, 1.5
