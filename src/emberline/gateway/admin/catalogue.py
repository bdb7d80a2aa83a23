"""What the gateway knows without being configured: the providers that exist, and the models of the price catalogue."""

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
    base_url: str  # where requests go unless the settings say another; {name}: filled in from the key or the settings
    needs_key: bool
    has_key: bool  # whether this account has stored one
    speaks: list[str]


class CatalogueModel(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # provider/model
    kind: str  # chat, embedding
    price: Any  # micro-dollars per million tokens; null: unknown
    context: int | None  # tokens
    max_output: int | None  # tokens
    source: str
    as_of: str


class CatalogueDesk:
    def __init__(self, desk: Desk, catalogue: CatalogueFiles) -> None:
        self._desk = desk
        self._catalogue = catalogue

    def endpoints(self) -> list[Endpoint]:
        base, page = "/admin/accounts/{account}", ("after", "limit")
        return [
            Endpoint("GET", f"{base}/providers", "Every known provider", self.providers, reply=Listing, query=page),
            Endpoint("GET", f"{base}/catalogue", "Every model it has", self.models, reply=Listing, query=page),
        ]

    async def providers(self, ask: Ask) -> Listing:
        keys = {Place.of(document).provider for document in await self._desk.all("provider_key", ask.account)}
        return _page(
            ask,
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

    async def models(self, ask: Ask) -> Listing:
        return _page(ask, {f"{model.provider}/{model.name}": _row(model) for model in self._catalogue.current.models()})


def _page(ask: Ask, rows: dict[str, Any]) -> Listing:
    limit, after = ask.number("limit", PAGE, 1, MOST), ask.query.get("after", "")
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
