"""CatalogueEndpoints: lists the known providers and the models of the price catalogue."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.gateway.admin.admin_context import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, AdminContext
from emberline.gateway.admin.admin_request import AdminRequest
from emberline.gateway.admin.document_endpoints import Listing
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.costs.catalogue import CatalogueFiles, CatalogueModel
from emberline.gateway.keys.provider_key_vault import ProviderKeyID
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG


class KnownProvider(msgspec.Struct, frozen=True, kw_only=True):
    slug: str
    base_url: str  # default; {name} is filled in from the key or the settings
    needs_key: bool
    has_key: bool  # this account has a stored key
    speaks: list[str]  # dialects


class CatalogueModelView(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # provider/model
    kind: str  # chat, embedding
    price: Any  # in micro-dollars per million tokens; null: unknown
    context: int | None  # tokens
    max_output: int | None  # tokens
    source: str
    as_of: str


class CatalogueEndpoints:
    def __init__(self, context: AdminContext, catalogue: CatalogueFiles) -> None:
        self._context = context
        self._catalogue = catalogue

    def endpoints(self) -> list[AdminEndpoint]:
        base, page = "/admin/accounts/{account}", ("after", "limit")
        return [
            AdminEndpoint(
                "GET", f"{base}/providers", "List known providers", self.list_providers, reply=Listing, query=page
            ),
            AdminEndpoint(
                "GET",
                f"{base}/catalogue",
                "List the price catalogue's models",
                self.list_models,
                reply=Listing,
                query=page,
            ),
        ]

    async def list_providers(self, request: AdminRequest) -> Listing:
        keys = {
            ProviderKeyID.from_document(document).provider
            for document in await self._context.list_all_documents("provider_key", request.account)
        }
        return _list_page(
            request,
            {
                slug: KnownProvider(
                    slug=slug,
                    base_url=(slug == "emberline" and self._context.engine_url) or known.base_url,
                    needs_key=known.needs_key,
                    has_key=slug in keys,
                    speaks=sorted(known.paths),
                )
                for slug, known in PROVIDERS_BY_SLUG.items()
            },
        )

    async def list_models(self, request: AdminRequest) -> Listing:
        return _list_page(
            request,
            {f"{model.provider}/{model.name}": _build_model_view(model) for model in self._catalogue.current.models()},
        )


def _list_page(request: AdminRequest, rows_by_id: dict[str, Any]) -> Listing:
    limit, after = request.int_parameter("limit", DEFAULT_PAGE_SIZE, 1, MAX_PAGE_SIZE), request.query.get("after", "")
    left = sorted(id for id in rows_by_id if id > after)
    return Listing([rows_by_id[id] for id in left[:limit]], left[limit - 1] if len(left) > limit else "")


def _build_model_view(model: CatalogueModel) -> CatalogueModelView:
    return CatalogueModelView(
        id=f"{model.provider}/{model.name}",
        kind=model.kind,
        price=model.price,
        context=model.context,
        max_output=model.max_output,
        source=model.source,
        as_of=model.as_of.isoformat(),
    )
