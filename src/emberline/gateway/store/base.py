"""GatewayStore: the protocol of the gateway's persistent stores.

documents   objects of the management API: JSON under (kind, account, id); every change adds an audit entry
counters    of limits, for gateways that count without Redis
logs        records by day, payloads apart; retention drops whole days
rollups     counters by minute, hour and day, updated when records are appended, so that no query counts records
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Literal, Protocol

import msgspec

from emberline.gateway.logs.record import Payload, Record, Scalar
from emberline.gateway.store.filters import Filters
from emberline.gateway.store.rollup import Cell, RollupQuery

PATIENCE = 0.1
Kind = Literal["gateway", "key", "provider_key", "custom_provider", "route", "route_version", "price", "budget",
               "dataset", "batch", "batch_part"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    kind: Kind
    account: str
    id: str
    body: bytes  # JSON
    version: int = 0  # 0: not stored yet; each change adds one
    updated: int = 0  # ms since 1970


@dataclass(frozen=True, slots=True)
class Audit:
    """One change by one actor. `before` and `after` are JSON without secrets."""

    at: int  # ms since 1970
    account: str
    actor: str  # key id, or "operator" for the command line
    action: str  # for example gateway.create
    target: str  # id of the changed object
    before: bytes = b"null"
    after: bytes = b"null"
    number: int = 0  # set by the store, ascending


class Counter(msgspec.Struct, frozen=True, array_like=True):
    """The usage in one slot of a limit's bucket, or a change of it."""

    gateway: str  # account/gateway
    bucket: str
    slot: int
    used: int
    ends: int  # ms since 1970: from then on the counter is ignored


@dataclass(frozen=True, slots=True)
class Change:
    """Changes that are committed together. A document whose stored version differs is a Conflict."""

    audit: Audit
    put: Sequence[Document] = ()
    delete: Sequence[Document] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """One page of records, newest first.

    `has_more` is exact if the page is `complete`. If not, the timeout ended the search, and `cursor` continues it.
    """

    records: list[Record] = field(default_factory=list)
    has_more: bool = False
    cursor: str = ""  # `before` of the next page
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback on a record. A field that is None is left unchanged; metadata is merged into the record's."""

    feedback: int | None = None
    score: int | None = None
    metadata: dict[str, Scalar] | None = None

    def on(self, record: Record) -> Record:
        changes = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return msgspec.structs.replace(record, **changes | {"metadata": {**record.metadata, **(self.metadata or {})}})


class Store(Protocol):
    async def get(self, kind: Kind, account: str, id: str) -> Document | None: ...

    async def documents(
        self, kind: Kind, account: str, *, prefix: str = "", after: tuple[str, str] = ("", ""), limit: int = 100
    ) -> list[Document]:
        """Return documents sorted by id, then account. An empty account means all accounts.

        `after`: id and account of the last document of the previous page.
        """
        ...

    async def commit(self, change: Change) -> int:
        """Apply a change and return the store's new version. Raise Conflict if a document's version differs."""
        ...

    async def version(self) -> int:
        """Return a number that every commit of any replica increases. Caches use it to detect changes."""
        ...

    async def audits(self, account: str, *, before: int = 0, limit: int = 100) -> list[Audit]:
        """Return audit entries with numbers below `before` (0: all), newest first."""
        ...

    async def counters(self, now: int) -> list[Counter]:
        """Return the counters that have not ended. `now`: ms since 1970."""
        ...

    async def count(self, batch: str, changes: Sequence[Counter], now: int) -> None:
        """Add the changes, unless a batch of this name was added before, and delete counters that have ended."""
        ...

    async def append(self, batch: Sequence[tuple[Record, Payload | None]]) -> None: ...

    async def page(self, filters: Filters, *, before: str = "", limit: int = 50, patience: float = PATIENCE) -> Page:
        """Return a page of records. `before`: cursor of the previous page.

        After `timeout_s` the records found so far are returned as an incomplete page.
        """
        ...

    async def record(self, account: str, gateway: str, id: str) -> Record | None: ...

    async def payload(self, account: str, gateway: str, id: str) -> Payload | None: ...

    async def feedback(self, account: str, gateway: str, id: str, given: Feedback) -> Record | None:
        """Add feedback to a record and return the changed record, or None if there is no such record."""
        ...

    async def erase(self, records: Sequence[Record]) -> None:
        """Delete records and their payloads. Rollups still count them."""
        ...

    async def rollups(self, query: RollupQuery) -> list[Cell]: ...

    async def days(self) -> list[date]:
        """Return the days that have records, oldest first."""
        ...

    async def drop_before(self, day: date) -> list[date]:
        """Delete all days before `day` and return them.

        Their rollups by minute are deleted, too; those by hour are kept for HOURLY_CELLS_KEPT_DAYS more.
        """
        ...

    async def close(self) -> None: ...
