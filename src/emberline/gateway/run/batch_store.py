"""RunBatch and BatchStore: batches of queued requests and their results, kept in the gateway's store."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, TypeVar

import msgspec

from emberline.core.fair_threads import FairThreads
from emberline.gateway.store.base import AuditEntry, Document, DocumentKind, GatewayStore, StoreChange

Json = dict[str, Any]
BatchStatus = Literal["queued", "running", "done"]
BATCH_KIND: DocumentKind = "batch"
BATCH_PART_KIND: DocumentKind = "batch_part"

PAGE_SIZE = 200
ROW_THREADS = 2  # pack and unpack requests and results; a key uses one of them at most
P = ParamSpec("P")
T = TypeVar("T")


class RunBatch(msgspec.Struct, kw_only=True):
    id: str  # begins with the time of creation, so that ids sort by time
    account: str
    gateway: str
    model: str
    key_id: str  # key of the caller; "": none
    asked: dict[str, str] = {}  # option headers, sent with every request
    count: int  # requests
    created: int  # ms since 1970, as the other times
    status: BatchStatus = "queued"
    owner: str = ""  # process that works on the batch
    until: int = 0  # end of the owner's lease
    finished: int = 0

    @staticmethod
    def new(
        account: str,
        gateway: str,
        model: str,
        key_id: str,
        option_headers: Mapping[str, str],
        request_count: int,
        now_ms: int,
    ) -> RunBatch:
        number = (now_ms & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10))
        return RunBatch(
            id=str(uuid.UUID(int=number)),
            account=account,
            gateway=gateway,
            model=model,
            key_id=key_id,
            asked=dict(option_headers),
            count=request_count,
            created=now_ms,
        )

    @property
    def owning_key(self) -> tuple[str, str]:
        return self.account, self.key_id

    @property
    def summary(self) -> Json:
        """Return the batch in the JSON form of Workers AI's API."""
        return {"status": self.status, "request_id": self.id, "model": self.model}


class BatchStore:
    """Reads and writes batches in the gateway's store.

    A write based on an outdated version raises Conflict.
    """

    def __init__(self, store: GatewayStore) -> None:
        self._store = store
        self._threads = FairThreads("packings and readings of batches", ROW_THREADS)

    async def store_version(self) -> int:
        """Return a number that increases with every change of the store."""
        return await self._store.version()

    async def list_batches(self, account: str = "", after: tuple[str, str] = ("", "")) -> list[Document]:
        """Return a page of batches, oldest first. An empty account means all accounts."""
        return await self._store.list_documents(BATCH_KIND, account, after=after, limit=PAGE_SIZE)

    async def find_batch(self, account: str, batch_id: str) -> tuple[RunBatch, Document] | None:
        found = await self._store.get(BATCH_KIND, account, batch_id)
        return None if found is None else (decode_batch(found), found)

    async def read_part(self, batch: RunBatch, part_name: str) -> tuple[list[Any], Document | None]:
        """Return the rows of a part of a batch, and the part's document.

        Return [] and None if the part is not stored. The parts are "in" (requests) and "out" (results).
        """
        found = await self._store.get(BATCH_PART_KIND, batch.account, f"{batch.id}/{part_name}")
        return ([] if found is None else await self.run_in_thread(batch.owning_key, _unpack_rows, found.body)), found

    async def run_in_thread(
        self, key: tuple[str, str], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the function in a thread of the batches. The keys, each an account and a key's id, take turns."""
        return await self._threads.run("/".join(key), function, *args, **kwargs)

    def close(self) -> None:
        self._threads.close()

    async def add_batch(self, batch: RunBatch, requests: PackedRequests) -> None:
        put = [_batch_document(batch, 0), _part_document(batch, "in", requests.packed, 0)]
        await self._store.commit(StoreChange(_audit_entry(batch, "create", batch.created), put=put))

    async def save_batch(
        self, batch: RunBatch, version: int, now_ms: int, results: tuple[list[Json], int] | None = None
    ) -> None:
        """Replace the stored batch and, if given, its results.

        `version`: the version of the batch that is replaced. `results`: the new rows, and the version of the results
        that are replaced, 0 if none are stored. Raise Conflict if a different version is stored.
        """
        put = [_batch_document(batch, version)]
        if results is not None:
            rows, results_version = results
            packed = await self.run_in_thread(batch.owning_key, pack_rows, rows)
            put.append(_part_document(batch, "out", packed, results_version))
        await self._store.commit(StoreChange(_audit_entry(batch, batch.status, now_ms), put=put))

    async def remove_batch(self, document: Document, now_ms: int) -> None:
        batch = decode_batch(document)
        parts = [found for name in ("in", "out") if (found := (await self.read_part(batch, name))[1]) is not None]
        await self._store.commit(StoreChange(_audit_entry(batch, "delete", now_ms), delete=[document, *parts]))


def decode_batch(document: Document) -> RunBatch:
    return msgspec.json.decode(document.body, type=RunBatch)


def _batch_document(batch: RunBatch, version: int) -> Document:
    return Document(BATCH_KIND, batch.account, batch.id, msgspec.json.encode(batch), version)


class PackedRequests(msgspec.Struct, frozen=True):
    """The checked requests of a batch in their stored form."""

    count: int
    packed: bytes  # compressed JSON


def pack_rows(rows: list[Json]) -> bytes:
    return zlib.compress(msgspec.json.encode(rows), 1)


def _unpack_rows(body: bytes) -> list[Any]:
    found: list[Any] = msgspec.json.decode(zlib.decompress(body))
    return found


def _part_document(batch: RunBatch, part_name: str, body: bytes, version: int) -> Document:
    return Document(BATCH_PART_KIND, batch.account, f"{batch.id}/{part_name}", body, version)


def _audit_entry(batch: RunBatch, action: str, now_ms: int) -> AuditEntry:
    return AuditEntry(now_ms, batch.account, batch.key_id or "anonymous", f"batch.{action}", batch.id)
