"""GatewayStore: the interface of the gateway's persistent stores. A store has four parts:

documents   JSON objects of the management API under (kind, account, id); every change adds an audit entry
counters    usage counted against limits, for gateways that count without Redis
logs        log records by day, with payloads in tables of their own; retention deletes whole days
rollups     sums by minute, hour and day, updated when records are appended, so that no query counts records
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Literal, Protocol

import msgspec

from emberline.gateway.core.log_record import LogPayload, LogRecord, MetadataValue
from emberline.gateway.store.filters import LogFilters
from emberline.gateway.store.rollup import RollupCell, RollupQuery

PAGE_TIMEOUT_S = 0.1
DocumentKind = Literal["gateway", "key", "provider_key", "custom_provider", "route", "route_version", "price", "budget",
               "dataset", "batch", "batch_part", "secret"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    kind: DocumentKind
    account: str
    id: str
    body: bytes  # JSON
    version: int = 0  # 0: not stored yet; each change adds one
    updated: int = 0  # ms since 1970


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change, and the key or operator that made it. `before` and `after` are JSON without secrets."""

    at: int  # ms since 1970
    account: str
    actor: str  # key id, or "operator" for the command line
    action: str  # for example gateway.create
    target: str  # id of the changed object
    before: bytes = b"null"
    after: bytes = b"null"
    number: int = 0  # set by the store, ascending


class LimitCounter(msgspec.Struct, frozen=True, array_like=True):
    """The usage in one time slot of a limit's bucket, or an amount to add to it."""

    gateway: str  # account/gateway
    bucket: str
    slot: int
    used: int
    ends: int  # ms since 1970: from then on the counter is ignored


@dataclass(frozen=True, slots=True)
class StoreChange:
    """Changes that are committed together.

    `commit` raises Conflict if the store has a different version of one of the documents.
    """

    audit: AuditEntry
    put: Sequence[Document] = ()
    delete: Sequence[Document] = ()


@dataclass(frozen=True, slots=True)
class RecordPage:
    """One page of log records, newest first.

    If `complete` is False, the timeout ended the search, and `cursor` continues it. `has_more` is exact only if
    `complete` is True.
    """

    records: list[LogRecord] = field(default_factory=list)
    has_more: bool = False
    cursor: str = ""  # `before` of the next page
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback on a log record. A field that is None leaves the record's field unchanged.

    `metadata` is merged into the record's metadata.
    """

    feedback: int | None = None
    score: int | None = None
    metadata: dict[str, MetadataValue] | None = None

    def apply_to(self, record: LogRecord) -> LogRecord:
        changes = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return msgspec.structs.replace(record, **changes | {"metadata": {**record.metadata, **(self.metadata or {})}})


class GatewayStore(Protocol):
    async def get(self, kind: DocumentKind, account: str, id: str) -> Document | None: ...

    async def list_documents(
        self, kind: DocumentKind, account: str, *, prefix: str = "", after: tuple[str, str] = ("", ""), limit: int = 100
    ) -> list[Document]:
        """Return documents sorted by id, then account. An empty account means all accounts.

        `after` is (id, account) of the last document of the previous page.
        """
        ...

    async def commit(self, change: StoreChange) -> int:
        """Apply a change and return the store's new version.

        Raise Conflict if the store has a different version of a document.
        """
        ...

    async def version(self) -> int:
        """Return a number that increases with every commit of any replica. Caches use it to detect changes."""
        ...

    async def list_audit_entries(self, account: str, *, before: int = 0, limit: int = 100) -> list[AuditEntry]:
        """Return audit entries, newest first. `before`: only entries with a lower number; 0 means all."""
        ...

    async def list_counters(self, now: int) -> list[LimitCounter]:
        """Return the counters whose time slot still counts against its limit at `now`.

        `now` is in milliseconds since 1970.
        """
        ...

    async def add_counters(self, batch_name: str, changes: Sequence[LimitCounter], now: int) -> None:
        """Add the changes to the counters, and delete counters whose time slot no longer counts.

        Do nothing if a batch with this name was added before.
        """
        ...

    async def append_records(self, records: Sequence[tuple[LogRecord, LogPayload | None]]) -> None: ...

    async def read_page(
        self, filters: LogFilters, *, before: str = "", limit: int = 50, timeout_s: float = PAGE_TIMEOUT_S
    ) -> RecordPage:
        """Return a page of log records. `before` is the cursor of the previous page.

        After `timeout_s` seconds, the records found until then are returned as an incomplete page.
        """
        ...

    async def get_record(self, account: str, gateway: str, id: str) -> LogRecord | None: ...

    async def get_payload(self, account: str, gateway: str, id: str) -> LogPayload | None: ...

    async def add_feedback(self, account: str, gateway: str, id: str, feedback: Feedback) -> LogRecord | None:
        """Add feedback to a log record. Return the changed record, or None if there is no such record."""
        ...

    async def erase_records(self, records: Sequence[LogRecord]) -> None:
        """Delete log records and their payloads. The rollups still count these records."""
        ...

    async def read_rollups(self, query: RollupQuery) -> list[RollupCell]: ...

    async def list_days(self) -> list[date]:
        """Return the days that have log records, oldest first."""
        ...

    async def delete_days_before(self, day: date) -> list[date]:
        """Delete the log records of all days before `day`, and return these days.

        The rollups by minute of these days are also deleted. Rollups by hour are kept for HOURLY_CELLS_KEPT_DAYS
        longer.
        """
        ...

    async def close(self) -> None: ...
