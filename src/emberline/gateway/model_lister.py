"""ModelLister: lists the models that a caller can use.

Self-hosted servers are asked for their models. Models of other providers are taken from the price catalogue, if there
is a key for the provider. If a server does not answer or refuses, its models are not listed, and the reason is logged.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import msgspec

from emberline.api.openai.models import ServedModel
from emberline.gateway.core.errors import UpstreamFailed
from emberline.gateway.core.identity import Identity, allows_model
from emberline.gateway.core.request import DYNAMIC, POOL, VIRTUAL_PROVIDERS
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.costs.catalogue import CatalogueFiles
from emberline.gateway.keys.provider_keys import DEFAULT_ALIAS, ProviderKeySource
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.routes.model_names import resolve_model
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.net.json_errors import JSON_DECODE_ERRORS

log = logging.getLogger("emberline.gateway")

LIST_TIMEOUT_S = 2.0  # seconds
MAX_LIST_BYTES = 4 << 20


class _ListedModel(msgspec.Struct):
    id: str
    created: int = 0
    max_model_len: int = 0
    owned_by: str = ""
    kind: str = "chat"  # servers other than Emberline do not send it


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


class ModelLister:
    def __init__(
        self, registry: ProviderRegistry, vault: ProviderKeySource, upstream: UpstreamClient, catalogue: CatalogueFiles
    ) -> None:
        self._registry = registry
        self._vault = vault
        self._upstream = upstream
        self._catalogue = catalogue
        # By account, gateway and provider: why models could not be listed, as it was last logged.
        self._problems: dict[tuple[str, str, str], str] = {}

    async def list_models(
        self, settings: GatewaySettings, identity: Identity, *, with_provider: bool = False
    ) -> list[ServedModel]:
        """Return the models that the caller may use, under the names that requests use.

        `with_provider`: every name begins with its provider, even for models of the default provider.
        """
        providers = [slug for slug, each in settings.providers.items() if each.enabled]
        found = await asyncio.gather(*(self._list_provider_models(slug, settings) for slug in providers))
        models: dict[tuple[str, str], ServedModel] = {}
        for slug, rows in zip(providers, found, strict=True):
            for row in rows:
                if identity.may_use_model(slug, row.id) and _is_model_allowed(settings, slug, row.id):
                    name = row.id if slug == settings.default_provider and not with_provider else f"{slug}/{row.id}"
                    owner = row.owned_by or slug
                    models[slug, row.id] = ServedModel(name, row.created, row.max_model_len, owner, row.kind)
        others = []
        for alias in settings.models:
            provider, model = resolve_model(alias, settings)
            is_allowed = provider in VIRTUAL_PROVIDERS or _is_model_allowed(settings, provider, model)
            if is_allowed and identity.may_use_model(provider, model):
                target = models.get((provider, model), ServedModel(alias, 0, 0))
                others.append(replace(target, id=alias, owned_by="emberline"))
        others += [ServedModel(name, 0, 0) for name in settings.pools if identity.may_use_model(POOL, name)]
        others += [
            ServedModel(f"{DYNAMIC}/{name}", 0, 0) for name in settings.routes if identity.may_use_model(DYNAMIC, name)
        ]
        return sorted([*models.values(), *others], key=lambda model: model.id)

    async def _list_provider_models(self, slug: str, settings: GatewaySettings) -> list[_ListedModel]:
        provider = self._registry.find_provider(slug, settings)
        key = await self._vault.get_key(settings.account, slug, DEFAULT_ALIAS) or settings.providers[slug].key
        if not provider.needs_key:
            models, problem = await self._fetch_server_models(provider, key)
            self._log_problem(slug, settings, problem)
            return models
        known = self._catalogue.current.models(slug) if key is not None else []
        return [_ListedModel(model.name, 0, model.context or 0, kind=model.kind) for model in known]

    async def _fetch_server_models(self, provider: Provider, key: str | None) -> tuple[list[_ListedModel], str]:
        """Return the models of a server and "", or no models and the reason why they could not be read."""
        headers = {"accept": "application/json"}
        if key is not None:
            provider.set_auth_headers(headers, key)
        out = ProviderRequest(
            "GET", provider.build_url(f"{provider.prefix}models", ""), headers, b"", provider.public_only
        )
        try:
            incoming = await self._upstream.send(out, LIST_TIMEOUT_S)
            try:
                body = await incoming.read_all(LIST_TIMEOUT_S, MAX_LIST_BYTES)
            finally:
                incoming.close()
            if incoming.status in (401, 403):
                return [], f"the server refuses the provider's key with status {incoming.status}"
            if incoming.status != 200:
                return [], f"the server answers with status {incoming.status}"
            return msgspec.json.decode(body, type=_ModelList).data, ""
        except UpstreamFailed as e:
            return [], str(e)
        except JSON_DECODE_ERRORS:
            return [], "what the server answers is not a list of models"

    def _log_problem(self, slug: str, settings: GatewaySettings, problem: str) -> None:
        """Log why the models of a gateway's provider are missing, unless the same reason was logged last."""
        place = settings.account, settings.gateway, slug
        if problem and self._problems.get(place) != problem:
            log.warning("Models cannot be listed: account=%s gateway=%s provider=%s reason=%r", *place, problem)
        self._problems[place] = problem


def _is_model_allowed(settings: GatewaySettings, provider: str, model: str) -> bool:
    return allows_model(settings.allowed_providers, settings.allowed_models, provider, model)
