"""AuditEndpoints: the audit log, which has every change and the key that made it."""

from __future__ import annotations

import msgspec

from emberline.gateway.admin.ask import Ask
from emberline.gateway.admin.desk import MOST, PAGE, Desk
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.shapes import AuditView
from emberline.gateway.admin.shelf import Listing


class AuditDesk:
    def __init__(self, context: Desk) -> None:
        self._context = context

    def endpoints(self) -> list[Endpoint]:
        path, query = "/admin/accounts/{account}/audit", ("before", "limit")
        summary = "Audit log: changes and the keys that made them, newest first"
        return [Endpoint("GET", path, summary, self.list, reply=Listing, query=query)]

    async def list(self, request: Ask) -> Listing:
        limit = request.number("limit", PAGE, 1, MOST)
        before = request.number("before", 0, 0, 2**53)
        found = await self._context.store.audits(request.account, before=before, limit=limit + 1)
        views = [
            AuditView(
                number=each.number,
                at=each.at,
                actor=each.actor,
                action=each.action,
                target=each.target,
                before=msgspec.json.decode(each.before),
                after=msgspec.json.decode(each.after),
            )
            for each in found[:limit]
        ]
        return Listing(views, str(views[-1].number) if len(found) > limit else "")
