"""AuditEndpoints: reads the audit log, which contains every change and the key that made the change."""

from __future__ import annotations

import msgspec

from emberline.gateway.admin.admin_context import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, AdminContext
from emberline.gateway.admin.admin_request import AdminRequest
from emberline.gateway.admin.document_endpoints import Listing
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.schemas import AuditView


class AuditEndpoints:
    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def endpoints(self) -> list[AdminEndpoint]:
        path, query = "/admin/accounts/{account}/audit", ("before", "limit")
        summary = "Audit log: changes and the keys that made them, newest first"
        return [AdminEndpoint("GET", path, summary, self.list, reply=Listing, query=query)]

    async def list(self, request: AdminRequest) -> Listing:
        limit = request.int_parameter("limit", DEFAULT_PAGE_SIZE, 1, MAX_PAGE_SIZE)
        before = request.int_parameter("before", 0, 0, 2**53)
        found = await self._context.store.list_audit_entries(request.account, before=before, limit=limit + 1)
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
