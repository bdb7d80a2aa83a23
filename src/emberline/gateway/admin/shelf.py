"""DocumentEndpoints: list, get, create, replace, patch and delete documents of one kind."""

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
    next: str = ""  # `after` of the next page; empty on the last page


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    version: int  # each change adds one; a change with `version=` fails if the stored version differs
    updated: int  # ms since 1970
    value: Any


class Shelf(Generic[T]):
    def __init__(
        self, context: Desk, kind: Kind, type: type[T], *, where: str, id: str, check: Callable[[T, Ask], Awaitable[T]]
    ) -> None:
        """`path`: part of the URL, such as budgets; `id`: path parameters, such as budget or provider/model.

        `check` returns the value to store, or raises InvalidRequest.
        """
        self._context = context
        self._kind = kind
        self._type = type
        self._path = where
        self._id = id
        self._check = check

    def endpoints(self) -> list[Endpoint]:
        many = f"/admin/accounts/{{account}}/{self._path}"
        one = many + "".join(f"/{{{part}}}" for part in self._id.split("/"))
        noun, kind, version = self._kind.replace("_", " "), self._type, ("version",)
        return [
            Endpoint("GET", many, f"List {noun}s", self.list, reply=Listing, query=("after", "limit")),
            Endpoint("GET", one, f"Get a {noun}", self.get, reply=Stored),
            Endpoint("POST", one, f"Create a {noun}", self.create, kind, Stored, status=201),
            Endpoint("PUT", one, f"Replace a {noun}, or create it", self.put, kind, Stored, query=version),
            Endpoint(
                "PATCH",
                one,
                f"Change fields of a {noun}; null removes a field",
                self.patch,
                reply=Stored,
                query=version,
            ),
            Endpoint("DELETE", one, f"Delete a {noun}", self.delete, query=version),
        ]

    def key(self, request: Ask) -> str:
        """Return the document's id, made from the path parameters."""
        return "/".join(
            request.parts[part.rstrip("*")] if part.endswith("*") else named(request.parts[part], part)
            for part in self._id.split("/")
        )

    async def list(self, request: Ask) -> Listing:
        found, cursor = await self._context.listed(self._kind, request)
        return Listing([self.view(each) for each in found], cursor)

    async def get(self, request: Ask) -> Stored:
        return self.view(await self._context.found(self._kind, request.account, self.key(request)))

    async def create(self, request: Ask) -> Stored:
        return await self._save(request, None, request.read(self._type))

    async def put(self, request: Ask) -> Stored:
        old = await self._context.store.get(self._kind, request.account, self.key(request))
        return await self._save(request, based_on(old, request) if old else None, request.read(self._type))

    async def patch(self, request: Ask) -> Stored:
        old = based_on(await self._context.found(self._kind, request.account, self.key(request)), request)
        merged = merge(msgspec.json.decode(old.body), request.read(dict[str, Any]))
        return await self._save(request, old, converted(merged, self._type))

    async def delete(self, request: Ask) -> dict[str, Any]:
        old = based_on(await self._context.found(self._kind, request.account, self.key(request)), request)
        before = self.view(old).value
        await self._context.change(request, f"{self._kind}.delete", old.id, delete=[old], before=before)
        return {"id": old.id, "deleted": True}

    async def _save(self, request: Ask, old: Document | None, value: T) -> Stored:
        value = await self._check(value, request)
        before = self.view(old).value if old else None
        document = changed(old or Document(self._kind, request.account, self.key(request), b""), value)
        action = f"{self._kind}.{'update' if old else 'create'}"
        await self._context.change(request, action, document.id, put=[document], before=before, after=value)
        return Stored(id=document.id, version=document.version + 1, updated=self._context.now(), value=value)

    def view(self, document: Document) -> Stored:
        value = decoded(document.body, self._type)
        return Stored(id=document.id, version=document.version, updated=document.updated, value=value)


def merge(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396): objects are merged, null removes, every other value replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged
