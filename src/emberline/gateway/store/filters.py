"""LogFilters: the conditions by which a query selects log records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NumberRange:
    """A range that includes both ends. None means no bound. A missing value is in no bounded range."""

    minimum: int | None = None
    maximum: int | None = None

    @property
    def is_unbounded(self) -> bool:
        return self.minimum is None and self.maximum is None


@dataclass(frozen=True, slots=True)
class ExcludeFilter:
    """Selects log records whose `field` has none of the `values`."""

    field: str  # of LogFilters
    values: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ContainsFilter:
    """Selects log records in which one of `fields` contains one of `texts`, ignoring ASCII case."""

    fields: tuple[str, ...]  # text fields of LogFilters
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LogFilters:
    """Selects log records that match all filters that are set.

    A filter with several values matches any of them. An empty `gateway` selects the records of all the account's
    gateways.
    """

    account: str
    gateway: str = ""
    since: int | None = None  # ms since 1970, inclusive
    until: int | None = None  # ms since 1970, exclusive
    success: bool | None = None
    cached: bool | None = None
    rescued: bool | None = None  # answered by a fallback
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
    micros: NumberRange = NumberRange()
    tokens_in: NumberRange = NumberRange()
    tokens_out: NumberRange = NumberRange()
    tokens: NumberRange = NumberRange()  # input and output
    duration_ms: NumberRange = NumberRange()
    excluded: tuple[ExcludeFilter, ...] = ()
    contains: tuple[ContainsFilter, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)  # values as JSON text: true, 1.5
