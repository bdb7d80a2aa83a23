"""AdminContext: what all endpoints share. `commit` makes every change and adds an audit entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import NotFound
from emberline.gateway.admin.ask import Ask
from emberline.gateway.errors import Conflict
from emberline.gateway.keys.vault import Vault
from emberline.gateway.limits.base import Limiter
from emberline.gateway.settings import Settings
from emberline.gateway.store.base import Audit, Change, Document, Kind, Store

PAGE = 100
MOST = 1000


class Desk:
    def __init__(
        self,
        store: Store,
        vault: Vault,
        wall: Clock,
        limiter: Limiter,
        *,
        fixed: Mapping[tuple[str, str], Settings] | None = None,
        allow_private: bool = False,
    ) -> None:
        """`configured`: gateways of the configuration file, by account and name. The API cannot change them."""
        self.store = store
        self.vault = vault
        self.limiter = limiter
        self.fixed = dict(fixed or {})
        self.allow_private = allow_private
        self._wall_clock = wall

    def now(self) -> int:
        """Return the time in milliseconds since 1970."""
        return round(self._wall_clock.now() * 1e3)

    async def found(self, kind: Kind, account: str, id: str) -> Document:
        """Return a document. Raise NotFound if it does not exist."""
        document = await self.store.get(kind, account, id)
        if document is None:
            raise NotFound(f"account {account[:80]!r} has no {kind.replace('_', ' ')} {id[:80]!r}")
        return document

    async def listed(self, kind: Kind, request: Ask, prefix: str = "") -> tuple[list[Document], str]:
        """Return a page of documents and the cursor of the next page, which is empty at the end."""
        limit = request.number("limit", PAGE, 1, MOST)
        after = (request.query.get("after", ""), request.account)
        found = await self.store.documents(kind, request.account, prefix=prefix, after=after, limit=limit + 1)
        return found[:limit], found[limit - 1].id if len(found) > limit else ""

    async def all(self, kind: Kind, account: str) -> list[Document]:
        found: list[Document] = []
        after = ("", "")
        while page := await self.store.documents(kind, account, after=after, limit=MOST):
            found += page
            after = (page[-1].id, page[-1].account)
        return found

    async def change(
        self,
        request: Ask,
        action: str,
        target: str,
        *,
        put: Sequence[Document] = (),
        delete: Sequence[Document] = (),
        before: Any = None,
        after: Any = None,
    ) -> None:
        """Commit a change with its audit entry, which shows `before` and `after`: they must have no secrets."""
        audit = Audit(
            at=self.now(),
            account=request.account,
            actor=request.identity.key_id,
            action=action,
            target=target,
            before=msgspec.json.encode(before),
            after=msgspec.json.encode(after),
        )
        await self.store.commit(Change(audit, put=put, delete=delete))


def based_on(document: Document, request: Ask) -> Document:
    """Return the document. Raise Conflict if the query names another version than the stored one."""
    version = request.number("version", document.version, 0, 2**53)
    if version != document.version:
        raise Conflict.of(document.kind, document.id, is_new=False)
    return document


def changed(document: Document, body: Any) -> Document:
    return replace(document, body=msgspec.json.encode(body))
