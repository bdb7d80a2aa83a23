"""Audit: who changed what, newest first."""

from __future__ import annotations

import msgspec

from emberline.gateway.admin.ask import Ask
from emberline.gateway.admin.desk import MOST, PAGE, Desk
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.shapes import AuditView
from emberline.gateway.admin.shelf import Listing


class AuditDesk:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def endpoints(self) -> list[Endpoint]:
        path, query = "/admin/accounts/{account}/audit", ("before", "limit")
        return [Endpoint("GET", path, "Who changed what, newest first", self.list, reply=Listing, query=query)]

    async def list(self, ask: Ask) -> Listing:
        limit = ask.number("limit", PAGE, 1, MOST)
        before = ask.number("before", 0, 0, 2**53)
        found = await self._desk.store.audits(ask.account, before=before, limit=limit + 1)
        shown = [
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
        return Listing(shown, str(shown[-1].number) if len(found) > limit else "")
