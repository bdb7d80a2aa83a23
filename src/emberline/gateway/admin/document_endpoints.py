"""DocumentEndpoints: list, get, create, replace, patch and delete documents of one kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from emberline.gateway.admin.admin_context import AdminContext, check_version, document_with_body
from emberline.gateway.admin.admin_request import AdminRequest, check_name, convert_value, decode_json
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.store.base import Document, DocumentKind

T = TypeVar("T")


class Listing(msgspec.Struct, frozen=True):
    items: list[Any]
    next: str = ""  # `after` of the next page; empty on the last page


class StoredView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    version: int  # each change adds one; a change with `version=` fails if the stored version differs
    updated: int  # ms since 1970
    value: Any


class DocumentEndpoints(Generic[T]):
    def __init__(
        self,
        context: AdminContext,
        kind: DocumentKind,
        type: type[T],
        *,
        path_name: str,
        id_parameters: str,
        check_value: Callable[[T, AdminRequest], Awaitable[T]],
    ) -> None:
        """Create the endpoints for documents of type `type`.

        `path_name`: the part of the URL that names these documents, such as "budgets". `id_parameters`: the path
        parameters that form a document's id, such as "budget" or "provider/model". `check_value` returns the value to
        store, or raises InvalidRequest.
        """
        self._context = context
        self._kind = kind
        self._type = type
        self._path = path_name
        self._id = id_parameters
        self._check = check_value

    def endpoints(self) -> list[AdminEndpoint]:
        many = f"/admin/accounts/{{account}}/{self._path}"
        one = many + "".join(f"/{{{part}}}" for part in self._id.split("/"))
        noun, kind, version = self._kind.replace("_", " "), self._type, ("version",)
        return [
            AdminEndpoint("GET", many, f"List {noun}s", self.list, reply=Listing, query=("after", "limit")),
            AdminEndpoint("GET", one, f"Get a {noun}", self.get, reply=StoredView),
            AdminEndpoint("POST", one, f"Create a {noun}", self.create, kind, StoredView, status=201),
            AdminEndpoint("PUT", one, f"Replace a {noun}, or create it", self.put, kind, StoredView, query=version),
            AdminEndpoint(
                "PATCH",
                one,
                f"Change fields of a {noun}; null removes a field",
                self.patch,
                reply=StoredView,
                query=version,
            ),
            AdminEndpoint("DELETE", one, f"Delete a {noun}", self.delete, query=version),
        ]

    def document_id(self, request: AdminRequest) -> str:
        """Return the document's id, joined from the path parameters."""
        return "/".join(
            request.path_parameters[part.rstrip("*")]
            if part.endswith("*")
            else check_name(request.path_parameters[part], part)
            for part in self._id.split("/")
        )

    async def list(self, request: AdminRequest) -> Listing:
        found, cursor = await self._context.list_document_page(self._kind, request)
        return Listing([self.to_view(each) for each in found], cursor)

    async def get(self, request: AdminRequest) -> StoredView:
        return self.to_view(await self._context.get_document(self._kind, request.account, self.document_id(request)))

    async def create(self, request: AdminRequest) -> StoredView:
        return await self._save_value(request, None, request.decode_body(self._type))

    async def put(self, request: AdminRequest) -> StoredView:
        old = await self._context.store.get(self._kind, request.account, self.document_id(request))
        return await self._save_value(
            request, check_version(old, request) if old else None, request.decode_body(self._type)
        )

    async def patch(self, request: AdminRequest) -> StoredView:
        old = check_version(
            await self._context.get_document(self._kind, request.account, self.document_id(request)), request
        )
        merged = merge_patch(msgspec.json.decode(old.body), request.decode_body(dict[str, Any]))
        return await self._save_value(request, old, convert_value(merged, self._type))

    async def delete(self, request: AdminRequest) -> dict[str, Any]:
        old = check_version(
            await self._context.get_document(self._kind, request.account, self.document_id(request)), request
        )
        before = self.to_view(old).value
        await self._context.commit(request, f"{self._kind}.delete", old.id, delete=[old], before=before)
        return {"id": old.id, "deleted": True}

    async def _save_value(self, request: AdminRequest, old: Document | None, value: T) -> StoredView:
        value = await self._check(value, request)
        before = self.to_view(old).value if old else None
        document = document_with_body(
            old or Document(self._kind, request.account, self.document_id(request), b""), value
        )
        action = f"{self._kind}.{'update' if old else 'create'}"
        await self._context.commit(request, action, document.id, put=[document], before=before, after=value)
        return StoredView(id=document.id, version=document.version + 1, updated=self._context.now_ms(), value=value)

    def to_view(self, document: Document) -> StoredView:
        value = decode_json(document.body, self._type)
        return StoredView(id=document.id, version=document.version, updated=document.updated, value=value)


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396) and return the result.

    Objects are merged, null removes a field, and any other value replaces the old value.
    """
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged
