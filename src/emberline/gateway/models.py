"""ModelLister: the models that a caller can use.

Self-hosted servers are queried for their models. The models of other providers come from the catalogue, if there is a
key for the provider. A server that does not answer adds no models.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec

from emberline.api.openai.models import ServedModel
from emberline.gateway.call import DYNAMIC, POOL
from emberline.gateway.costs.catalogue import CatalogueFiles
from emberline.gateway.errors import UpstreamFailed
from emberline.gateway.keys.identity import Identity, allows
from emberline.gateway.keys.secrets import DEFAULT_ALIAS, Vault
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.registry import Registry
from emberline.gateway.settings import Settings
from emberline.gateway.upstream.outgoing import Outgoing
from emberline.gateway.upstream.upstream import Upstream
from emberline.net.notjson import NOT_JSON

PATIENCE = 2.0  # seconds
LARGEST = 4 << 20


class _Row(msgspec.Struct):
    id: str
    created: int = 0
    max_model_len: int = 0
    owned_by: str = ""
    kind: str = "chat"  # servers other than Emberline do not send it


class _Rows(msgspec.Struct):
    data: list[_Row]


class ModelList:
    def __init__(self, registry: Registry, vault: Vault, upstream: Upstream, catalogue: CatalogueFiles) -> None:
        self._registry = registry
        self._vault = vault
        self._upstream = upstream
        self._catalogue = catalogue

    async def of(self, settings: Settings, identity: Identity, *, named: bool = False) -> list[ServedModel]:
        """Return the models that this caller may use, under the names that requests take.

        `with_provider`: names always begin with the provider, also those of the default provider.
        """
        providers = [slug for slug, each in settings.providers.items() if each.enabled]
        found = await asyncio.gather(*(self._models_of(slug, settings) for slug in providers))
        models = []
        for slug, rows in zip(providers, found, strict=True):
            for row in rows:
                if identity.may_use(slug, row.id) and _is_allowed(settings, slug, row.id):
                    name = row.id if slug == settings.default_provider and not named else f"{slug}/{row.id}"
                    models.append(ServedModel(name, row.created, row.max_model_len, row.owned_by or slug, row.kind))
        names = {model.id: model for model in models}
        for alias, name in settings.models.items():
            target = names.get(name)
            models.append(replace(target, id=alias, owned_by="emberline") if target else ServedModel(alias, 0, 0))
        models += [ServedModel(name, 0, 0) for name in settings.pools if identity.may_use(POOL, name)]
        routes = [ServedModel(f"{DYNAMIC}/{name}", 0, 0) for name in settings.routes if identity.may_use(DYNAMIC, name)]
        return sorted([*models, *routes], key=lambda model: model.id)

    async def _models_of(self, slug: str, settings: Settings) -> list[_Row]:
        provider = self._registry.find(slug, settings)
        key = await self._vault.reveal(settings.account, slug, DEFAULT_ALIAS) or settings.providers[slug].key
        if not provider.needs_key:
            return await self._query_server(provider, key)
        known = self._catalogue.current.models(slug) if key is not None else []
        return [_Row(model.name, 0, model.context or 0, kind=model.kind) for model in known]

    async def _query_server(self, provider: Provider, key: str | None) -> list[_Row]:
        headers = {"accept": "application/json"}
        if key is not None:
            provider.authorize(headers, key)
        out = Outgoing("GET", provider.url(f"{provider.prefix}models", ""), headers, b"", provider.public)
        try:
            incoming = await self._upstream.send(out, PATIENCE)
            try:
                body = await incoming.whole(PATIENCE, LARGEST)
            finally:
                incoming.close()
            return msgspec.json.decode(body, type=_Rows).data if incoming.status == 200 else []
        except (UpstreamFailed, *NOT_JSON):
            return []


def _is_allowed(settings: Settings, provider: str, model: str) -> bool:
    return allows(settings.allowed_providers, settings.allowed_models, provider, model)
