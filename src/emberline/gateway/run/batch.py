"""RunBatch and BatchStore: batches of queued requests and their results in the store."""

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

PAGE = 200


class Batch(msgspec.Struct, kw_only=True):
    id: str  # begins with the time of creation, so that ids sort by time
    account: str
    gateway: str
    model: str
    key_id: str  # key of the caller; "": none
    asked: dict[str, str] = {}  # option headers, sent with every request
    count: int  # requests
    created: int  # ms since 1970, as the other times
    status: Status = "queued"
    owner: str = ""  # process that works on the batch
    until: int = 0  # end of the owner's lease
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
        """Return the batch as Workers AI's API shows it."""
        return {"status": self.status, "request_id": self.id, "model": self.model}


class Shelf:
    """Batches in the store. A change that is based on an old version raises Conflict."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def open(self, account: str = "", after: tuple[str, str] = ("", "")) -> list[Document]:
        """Return a page of batches, oldest first. An empty account means all accounts."""
        return await self._store.documents(State, account, after=after, limit=PAGE)

    async def find(self, account: str, id: str) -> tuple[Batch, Document] | None:
        found = await self._store.get(State, account, id)
        return None if found is None else (read(found), found)

    async def part(self, batch: Batch, name: str) -> tuple[list[Any], Document | None]:
        """Return the rows of a part ("in": requests, "out": results) and its document, if it is stored."""
        found = await self._store.get(Part, batch.account, f"{batch.id}/{name}")
        return ([] if found is None else await asyncio.to_thread(_unpack_rows, found.body)), found

    async def add(self, batch: Batch, requests: PackedRequests) -> None:
        put = [_batch_document(batch, 0), _part_document(batch, "in", requests.packed, 0)]
        await self._store.commit(Change(_audit(batch, "create", batch.created), put=put))

    async def keep(self, batch: Batch, version: int, now: int, results: tuple[list[Json], int] | None = None) -> None:
        """Store the batch, whose stored version is `version`, and `results`: rows and their stored version."""
        put = [_batch_document(batch, version)]
        if results is not None:
            rows, results_version = results
            put.append(_part_document(batch, "out", await asyncio.to_thread(packed_rows, rows), results_version))
        await self._store.commit(Change(_audit(batch, batch.status, now), put=put))

    async def remove(self, document: Document, now: int) -> None:
        batch = read(document)
        parts = [found for name in ("in", "out") if (found := (await self.part(batch, name))[1]) is not None]
        await self._store.commit(Change(_audit(batch, "delete", now), delete=[document, *parts]))


def read(document: Document) -> Batch:
    return msgspec.json.decode(document.body, type=Batch)


def _batch_document(batch: Batch, version: int) -> Document:
    return Document(State, batch.account, batch.id, msgspec.json.encode(batch), version)


class PackedRequests(msgspec.Struct, frozen=True):
    """The checked requests of a batch in their stored form."""

    count: int
    packed: bytes  # compressed JSON


def packed_rows(rows: list[Json]) -> bytes:
    return zlib.compress(msgspec.json.encode(rows), 1)


def _unpack_rows(body: bytes) -> list[Any]:
    found: list[Any] = msgspec.json.decode(zlib.decompress(body))
    return found


def _part_document(batch: Batch, name: str, body: bytes, version: int) -> Document:
    return Document(Part, batch.account, f"{batch.id}/{name}", body, version)


def _audit(batch: Batch, action: str, now: int) -> Audit:
    return Audit(now, batch.account, batch.key_id or "anonymous", f"batch.{action}", batch.id)
