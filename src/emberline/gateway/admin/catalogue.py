"""CatalogueEndpoints: the known providers, and the models of the price catalogue."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.gateway.admin.ask import Ask
from emberline.gateway.admin.desk import MOST, PAGE, Desk
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.shelf import Listing
from emberline.gateway.costs.catalogue import CatalogueFiles, Model
from emberline.gateway.keys.vault import Place
from emberline.gateway.providers.registry import KNOWN


class KnownProvider(msgspec.Struct, frozen=True, kw_only=True):
    slug: str
    base_url: str  # default; {name} is filled in from the key or the settings
    needs_key: bool
    has_key: bool  # this account has a stored key
    speaks: list[str]  # dialects


class CatalogueModel(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # provider/model
    kind: str  # chat, embedding
    price: Any  # in micro-dollars per million tokens; null: unknown
    context: int | None  # tokens
    max_output: int | None  # tokens
    source: str
    as_of: str


class CatalogueDesk:
    def __init__(self, context: Desk, catalogue: CatalogueFiles) -> None:
        self._context = context
        self._catalogue = catalogue

    def endpoints(self) -> list[Endpoint]:
        base, page = "/admin/accounts/{account}", ("after", "limit")
        return [
            Endpoint("GET", f"{base}/providers", "List known providers", self.providers, reply=Listing, query=page),
            Endpoint(
                "GET", f"{base}/catalogue", "List the price catalogue's models", self.models, reply=Listing, query=page
            ),
        ]

    async def providers(self, request: Ask) -> Listing:
        keys = {Place.of(document).provider for document in await self._context.all("provider_key", request.account)}
        return _page(
            request,
            {
                slug: KnownProvider(
                    slug=slug,
                    base_url=known.base_url,
                    needs_key=known.needs_key,
                    has_key=slug in keys,
                    speaks=sorted(known.paths),
                )
                for slug, known in KNOWN.items()
            },
        )

    async def models(self, request: Ask) -> Listing:
        return _page(
            request, {f"{model.provider}/{model.name}": _row(model) for model in self._catalogue.current.models()}
        )


def _page(request: Ask, rows: dict[str, Any]) -> Listing:
    limit, after = request.number("limit", PAGE, 1, MOST), request.query.get("after", "")
    left = sorted(id for id in rows if id > after)
    return Listing([rows[id] for id in left[:limit]], left[limit - 1] if len(left) > limit else "")


def _row(model: Model) -> CatalogueModel:
    return CatalogueModel(
        id=f"{model.provider}/{model.name}",
        kind=model.kind,
        price=model.price,
        context=model.context,
        max_output=model.max_output,
        source=model.source,
        as_of=model.as_of.isoformat(),
    )
