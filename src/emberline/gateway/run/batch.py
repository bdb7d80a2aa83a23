"""Batch: requests that may wait, as the store keeps them: what is known of it, what is asked, what was answered."""

from __future__ import annotations

import asyncio
import os
import uuid
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from emberline.gateway.store.base import Audit, Change, Document, Kind, Store

Json = dict[str, Any]
Status = Literal["queued", "running", "done"]
State: Kind = "batch"
Part: Kind = "batch_part"

PAGE = 200  # batches read at once


class Batch(msgspec.Struct, kw_only=True):
    id: str  # begins with its time, so that ids are in the order in which they came
    account: str
    gateway: str
    model: str
    key_id: str  # of who asked; "": nobody whom we know
    asked: dict[str, str] = {}  # of the gateway itself, in headers
    count: int
    created: int  # ms, like the others
    status: Status = "queued"
    owner: str = ""  # which process works on it
    until: int = 0  # for how long nobody else does
    finished: int = 0

    @staticmethod
    def new(
        account: str, gateway: str, model: str, key_id: str, asked: Mapping[str, str], count: int, now: int
    ) -> Batch:
        number = (now & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10))
        return Batch(
            id=str(uuid.UUID(int=number)),
            account=account,
            gateway=gateway,
            model=model,
            key_id=key_id,
            asked=dict(asked),
            count=count,
            created=now,
        )

    @property
    def brief(self) -> Json:
        return {"status": self.status, "request_id": self.id, "model": self.model}


class Shelf:
    """Batches in the store. Whoever changes one must have seen it as it is: else it is a Conflict."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def open(self, account: str = "", after: tuple[str, str] = ("", "")) -> list[Document]:
        """Some of them, the oldest first."""
        return await self._store.documents(State, account, after=after, limit=PAGE)

    async def find(self, account: str, id: str) -> tuple[Batch, Document] | None:
        found = await self._store.get(State, account, id)
        return None if found is None else (read(found), found)

    async def part(self, batch: Batch, name: str) -> tuple[list[Any], Document | None]:
        found = await self._store.get(Part, batch.account, f"{batch.id}/{name}")
        return ([] if found is None else await asyncio.to_thread(_unpacked_rows, found.body)), found

    async def add(self, batch: Batch, requests: PackedRequests) -> None:
        put = [_state(batch, 0), _part(batch, "in", requests.packed, 0)]
        await self._store.commit(Change(_audit(batch, "create", batch.created), put=put))

    async def keep(self, batch: Batch, version: int, now: int, answers: tuple[list[Json], int] | None = None) -> None:
        """`version`: of what is stored. `answers`: and the version of those."""
        put = [_state(batch, version)]
        if answers is not None:
            rows, before = answers
            put.append(_part(batch, "out", await asyncio.to_thread(packed_rows, rows), before))
        await self._store.commit(Change(_audit(batch, batch.status, now), put=put))

    async def remove(self, document: Document, now: int) -> None:
        batch = read(document)
        parts = [found for name in ("in", "out") if (found := (await self.part(batch, name))[1]) is not None]
        await self._store.commit(Change(_audit(batch, "delete", now), delete=[document, *parts]))


def read(document: Document) -> Batch:
    return msgspec.json.decode(document.body, type=Batch)


def _state(batch: Batch, version: int) -> Document:
    return Document(State, batch.account, batch.id, msgspec.json.encode(batch), version)


class PackedRequests(msgspec.Struct, frozen=True):
    """The requests of a batch, checked, as they are stored."""

    count: int
    packed: bytes


def packed_rows(rows: list[Json]) -> bytes:
    return zlib.compress(msgspec.json.encode(rows), 1)


def _unpacked_rows(body: bytes) -> list[Any]:
    found: list[Any] = msgspec.json.decode(zlib.decompress(body))
    return found


def _part(batch: Batch, name: str, body: bytes, version: int) -> Document:
    return Document(Part, batch.account, f"{batch.id}/{name}", body, version)


def _audit(batch: Batch, action: str, now: int) -> Audit:
    return Audit(now, batch.account, batch.key_id or "anonymous", f"batch.{action}", batch.id)
