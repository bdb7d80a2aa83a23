"""AdminContext: the store, the key vault, the limiter and the clock that all endpoints share.

Every change goes through `commit`, which adds an audit entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import NotFound
from emberline.gateway.admin.admin_request import AdminRequest
from emberline.gateway.core.errors import Conflict
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.keys.provider_key_vault import ProviderKeyVault
from emberline.gateway.limits.base import Limiter
from emberline.gateway.store.base import AuditEntry, Document, DocumentKind, GatewayStore, StoreChange

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


class AdminContext:
    def __init__(
        self,
        store: GatewayStore,
        vault: ProviderKeyVault,
        wall_clock: Clock,
        limiter: Limiter,
        *,
        configured: Mapping[tuple[str, str], GatewaySettings] | None = None,
        allow_private: bool = False,
        engine_url: str = "",
    ) -> None:
        """Create the context that all endpoints share.

        `configured`: gateways of the configuration file, by account and name. The API cannot change them.
        `allow_private`: custom providers may be at private IP addresses. `engine_url`: address of the local engine.
        """
        self.store = store
        self.vault = vault
        self.limiter = limiter
        self.configured = dict(configured or {})
        self.allow_private = allow_private
        self.engine_url = engine_url
        self._wall_clock = wall_clock

    def now_ms(self) -> int:
        """Return the time in milliseconds since 1970."""
        return round(self._wall_clock.now() * 1e3)

    async def get_document(self, kind: DocumentKind, account: str, id: str) -> Document:
        """Return a document. Raise NotFound if it does not exist."""
        document = await self.store.get(kind, account, id)
        if document is None:
            noun = kind.replace("_", " ")
            raise NotFound(
                f"account {account[:80]!r} has no {noun} {id[:80]!r}", hint=f"list the account's {noun}s for valid ids"
            )
        return document

    async def list_document_page(
        self, kind: DocumentKind, request: AdminRequest, prefix: str = ""
    ) -> tuple[list[Document], str]:
        """Return a page of documents and the cursor of the next page, which is empty at the end."""
        limit = request.int_parameter("limit", DEFAULT_PAGE_SIZE, 1, MAX_PAGE_SIZE)
        after = (request.query.get("after", ""), request.account)
        found = await self.store.list_documents(kind, request.account, prefix=prefix, after=after, limit=limit + 1)
        return found[:limit], found[limit - 1].id if len(found) > limit else ""

    async def list_all_documents(self, kind: DocumentKind, account: str) -> list[Document]:
        found: list[Document] = []
        after = ("", "")
        while page := await self.store.list_documents(kind, account, after=after, limit=MAX_PAGE_SIZE):
            found += page
            after = (page[-1].id, page[-1].account)
        return found

    async def commit(
        self,
        request: AdminRequest,
        action: str,
        target: str,
        *,
        put: Sequence[Document] = (),
        delete: Sequence[Document] = (),
        before: Any = None,
        after: Any = None,
    ) -> None:
        """Write and delete documents in one transaction, together with an audit entry.

        The audit entry shows `before` and `after`, which must not contain secrets.
        """
        audit = AuditEntry(
            at=self.now_ms(),
            account=request.account,
            actor=request.identity.key_id,
            action=action,
            target=target,
            before=msgspec.json.encode(before),
            after=msgspec.json.encode(after),
        )
        await self.store.commit(StoreChange(audit, put=put, delete=delete))


def check_version(document: Document, request: AdminRequest) -> Document:
    """Return the document. Raise Conflict if its version differs from the query parameter `version`."""
    version = request.int_parameter("version", document.version, 0, 2**53)
    if version != document.version:
        raise Conflict.for_document(document.kind, document.id, is_new=False)
    return document


def document_with_body(document: Document, body: Any) -> Document:
    return replace(document, body=msgspec.json.encode(body))
