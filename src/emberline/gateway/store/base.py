"""Store: everything of the gateway that outlives a process, behind one protocol.

documents   what the management API changes: JSON under (kind, account, id), each change with its line of audit
counters    of limits, for gateways that count without Redis
logs        records by day, payloads apart; whole days are dropped
rollups     counters by minute, hour and day, added up when records are appended: pages never count rows
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

PATIENCE = 0.1  # seconds of a page
Kind = Literal["gateway", "key", "provider_key", "custom_provider", "route", "route_version", "price", "budget",
               "dataset", "batch", "batch_part"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    kind: Kind
    account: str
    id: str
    body: bytes  # JSON
    version: int = 0  # 0: not there yet; each change adds one
    updated: int = 0  # ms


@dataclass(frozen=True, slots=True)
class Audit:
    """Who changed what; `before` and `after` are JSON without secrets."""

    at: int  # ms
    account: str
    actor: str  # key id, or "operator" for the command line
    action: str  # such as gateway.create
    target: str
    before: bytes = b"null"
    after: bytes = b"null"
    number: int = 0  # given by the store, growing


class Counter(msgspec.Struct, frozen=True, array_like=True):
    """What was used, or a change of it, in one slot of a limit's bucket."""

    gateway: str  # account/gateway
    bucket: str
    slot: int
    used: int
    ends: int  # ms: then it no longer counts


@dataclass(frozen=True, slots=True)
class Change:
    """All of it or nothing. A document whose `version` is not the stored one is a Conflict."""

    audit: Audit
    put: Sequence[Document] = ()
    delete: Sequence[Document] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """Newest first. `has_more` is exact if `complete`; else time ran out, and `cursor` is where to look on."""

    records: list[Record] = field(default_factory=list)
    has_more: bool = False
    cursor: str = ""  # `before` of the next page
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Feedback:
    """What is None stays as it was; metadata is added to what a request had."""

    feedback: int | None = None
    score: int | None = None
    metadata: dict[str, Scalar] | None = None

    def on(self, record: Record) -> Record:
        given = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return msgspec.structs.replace(record, **given | {"metadata": {**record.metadata, **(self.metadata or {})}})


class Store(Protocol):
    async def get(self, kind: Kind, account: str, id: str) -> Document | None: ...

    async def documents(
        self, kind: Kind, account: str, *, prefix: str = "", after: tuple[str, str] = ("", ""), limit: int = 100
    ) -> list[Document]:
        """By id, then account. An empty account: those of all. `after`: the id and account of the last one seen."""
        ...

    async def commit(self, change: Change) -> int:
        """The store's new version."""
        ...

    async def version(self) -> int:
        """Grows with every commit, by whichever replica: cheap to ask, so that caches know when they are stale."""
        ...

    async def audits(self, account: str, *, before: int = 0, limit: int = 100) -> list[Audit]:
        """Newest first; `before` is a number, 0: from the newest on."""
        ...

    async def counters(self, now: int) -> list[Counter]:
        """Those that still count. `now`: ms."""
        ...

    async def count(self, batch: str, changes: Sequence[Counter], now: int) -> None:
        """Add the changes, once for each name of a batch, and forget counters that no longer count."""
        ...

    async def append(self, batch: Sequence[tuple[Record, Payload | None]]) -> None: ...

    async def page(self, filters: Filters, *, before: str = "", limit: int = 50, patience: float = PATIENCE) -> Page:
        """`before`: a cursor. After `patience` seconds what was found is returned, incomplete."""
        ...

    async def record(self, account: str, gateway: str, id: str) -> Record | None: ...

    async def payload(self, account: str, gateway: str, id: str) -> Payload | None: ...

    async def feedback(self, account: str, gateway: str, id: str, given: Feedback) -> Record | None:
        """As it is now. None: there is no such record."""
        ...

    async def erase(self, records: Sequence[Record]) -> None:
        """With their payloads. Rollups go on counting them."""
        ...

    async def rollups(self, query: RollupQuery) -> list[Cell]: ...

    async def days(self) -> list[date]:
        """Those that have records, oldest first."""
        ...

    async def drop_before(self, day: date) -> list[date]:
        """Days that are gone, whole, with their rollups by the minute; those by the hour stay for HOURS_KEPT more."""
        ...

    async def close(self) -> None: ...
