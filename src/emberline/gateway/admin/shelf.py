"""Shelf: documents of one kind that are made, read, replaced, patched and deleted as they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from emberline.gateway.admin.ask import Ask, converted, decoded, named
from emberline.gateway.admin.desk import Desk, based_on, changed
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.store.base import Document, Kind

T = TypeVar("T")


class Listing(msgspec.Struct, frozen=True):
    items: list[Any]
    next: str = ""  # `after` of the next page; empty: this was the last


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    version: int  # each change adds one: give it back with a change to be told if somebody was faster
    updated: int  # ms
    value: Any


class Shelf(Generic[T]):
    def __init__(
        self, desk: Desk, kind: Kind, type: type[T], *, where: str, id: str, check: Callable[[T, Ask], Awaitable[T]]
    ) -> None:
        """`where`: the part of the path, such as budgets; `id`: its parameter, such as budget or provider/model."""
        self._desk = desk
        self._kind = kind
        self._type = type
        self._where = where
        self._id = id
        self._check = check

    def endpoints(self) -> list[Endpoint]:
        many = f"/admin/accounts/{{account}}/{self._where}"
        one = many + "".join(f"/{{{part}}}" for part in self._id.split("/"))
        noun, kind, version = self._kind.replace("_", " "), self._type, ("version",)
        return [
            Endpoint("GET", many, f"Every {noun}", self.list, reply=Listing, query=("after", "limit")),
            Endpoint("GET", one, f"One {noun}", self.get, reply=Stored),
            Endpoint("POST", one, f"Make a {noun}", self.create, kind, Stored, status=201),
            Endpoint("PUT", one, f"Replace a {noun}, or make it", self.put, kind, Stored, query=version),
            Endpoint("PATCH", one, f"Change parts of a {noun}; null removes", self.patch, reply=Stored, query=version),
            Endpoint("DELETE", one, f"Delete a {noun}", self.delete, query=version),
        ]

    def key(self, ask: Ask) -> str:
        return "/".join(
            ask.parts[part.rstrip("*")] if part.endswith("*") else named(ask.parts[part], part)
            for part in self._id.split("/")
        )

    async def list(self, ask: Ask) -> Listing:
        found, cursor = await self._desk.listed(self._kind, ask)
        return Listing([self.view(each) for each in found], cursor)

    async def get(self, ask: Ask) -> Stored:
        return self.view(await self._desk.found(self._kind, ask.account, self.key(ask)))

    async def create(self, ask: Ask) -> Stored:
        return await self._save(ask, None, ask.read(self._type))

    async def put(self, ask: Ask) -> Stored:
        old = await self._desk.store.get(self._kind, ask.account, self.key(ask))
        return await self._save(ask, based_on(old, ask) if old else None, ask.read(self._type))

    async def patch(self, ask: Ask) -> Stored:
        old = based_on(await self._desk.found(self._kind, ask.account, self.key(ask)), ask)
        merged = merge(msgspec.json.decode(old.body), ask.read(dict[str, Any]))
        return await self._save(ask, old, converted(merged, self._type))

    async def delete(self, ask: Ask) -> dict[str, Any]:
        old = based_on(await self._desk.found(self._kind, ask.account, self.key(ask)), ask)
        before = self.view(old).value
        await self._desk.change(ask, f"{self._kind}.delete", old.id, delete=[old], before=before)
        return {"id": old.id, "deleted": True}

    async def _save(self, ask: Ask, old: Document | None, value: T) -> Stored:
        value = await self._check(value, ask)
        before = self.view(old).value if old else None
        document = changed(old or Document(self._kind, ask.account, self.key(ask), b""), value)
        action = f"{self._kind}.{'update' if old else 'create'}"
        await self._desk.change(ask, action, document.id, put=[document], before=before, after=value)
        return Stored(id=document.id, version=document.version + 1, updated=self._desk.now(), value=value)

    def view(self, document: Document) -> Stored:
        value = decoded(document.body, self._type)
        return Stored(id=document.id, version=document.version, updated=document.updated, value=value)


def merge(target: Any, patch: Any) -> Any:
    """A JSON merge patch: objects are merged, null removes, everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged
