"""CloudflareProviderEndpoints: Cloudflare's `provider_configs` (stored keys) and provider URLs.

Stored keys belong to the account: every gateway of the account can use a key that is stored below one gateway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.ask import Ask, named
from emberline.gateway.admin.cloudflare import PAGES, ROOT, Paged, iso, numbered, with_parts
from emberline.gateway.admin.desk import Desk
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.gateways import Gateways
from emberline.gateway.admin.keys import ProviderKeyDesk, provider_key_view
from emberline.gateway.admin.shapes import ProviderKeyView, ProviderKeyWish, Strict
from emberline.gateway.checked import CUSTOM
from emberline.gateway.errors import ProviderNotFound
from emberline.gateway.keys.secrets import DEFAULT_ALIAS
from emberline.gateway.providers.registry import KNOWN
from emberline.gateway.routes.universal import COMPAT
from emberline.gateway.settings import Settings

Json = dict[str, Any]
HIDDEN = "****"  # preview of a key, which is stored encrypted


class ProviderConfigWish(Strict, frozen=True, kw_only=True):
    alias: str
    default_config: bool
    provider_slug: str
    secret: Annotated[str, msgspec.Meta(min_length=1, max_length=16_384)]
    secret_id: None = None  # not supported: id in Cloudflare's secrets store
    rate_limit: Literal[0] | None = None  # not supported: limits are rules of a gateway
    rate_limit_period: Literal[0] | None = None


class CloudflareProviders:
    def __init__(self, context: Desk) -> None:
        self._context = context
        self._gateways = Gateways(context)
        self._keys = ProviderKeyDesk(context)

    def endpoints(self) -> list[Endpoint]:
        gateway = f"{ROOT}/gateways/{{gateway}}"
        configs = f"{gateway}/provider_configs"
        endpoints = [
            Endpoint("GET", configs, "List stored provider keys, without secrets", self.configs, query=PAGES),
            Endpoint("POST", configs, "Store a provider key, encrypted", self.create_config, ProviderConfigWish),
            Endpoint("GET", f"{gateway}/url/{{provider}}", "Get the base URL of a provider's paths", self.url),
        ]
        return [replace(each, cloudflare=True) for each in endpoints]

    async def configs(self, request: Ask) -> Paged:
        await self._gateways.get(request)
        found = [provider_key_view(each) for each in await self._context.all("provider_key", request.account)]
        return numbered(request, [_config_view(request, each) for each in found])

    async def create_config(self, request: Ask) -> Json:
        """Store a provider key. With default_config it is also stored under the alias `default`.

        Requests that name no alias use the alias `default`.
        """
        settings: Settings = (await self._gateways.get(request)).value
        spec = request.read(ProviderConfigWish)
        await self._check_provider(request, spec.provider_slug, settings)
        if spec.alias == DEFAULT_ALIAS and not spec.default_config:
            hint = "use another alias, or set default_config to true"
            raise InvalidRequest(
                f"a key with the alias {DEFAULT_ALIAS!r} cannot have default_config: false, because requests use it by"
                " default",
                param="default_config",
                hint=hint,
            )
        key = ProviderKeyWish(secret=spec.secret)
        aliases = [named(spec.alias, "alias"), *([DEFAULT_ALIAS] if spec.default_config else [])]
        for alias in dict.fromkeys(aliases):
            stored = await self._keys.put(with_parts(request, {"provider": spec.provider_slug, "alias": alias}, key))
        return {**_config_view(request, stored), "alias": spec.alias, "default_config": spec.default_config}

    async def url(self, request: Ask) -> str:
        settings: Settings = (await self._gateways.get(request)).value
        provider = request.parts["provider"]
        if provider != COMPAT:
            await self._check_provider(request, provider, settings)
        return f"{request.origin}/v1/{request.account}/{request.parts['gateway']}/{provider}"

    async def _check_provider(self, request: Ask, slug: str, settings: Settings) -> None:
        custom = {f"{CUSTOM}{each.id}" for each in await self._context.all("custom_provider", request.account)}
        known = {*KNOWN, *settings.providers, *custom}
        if slug not in known:
            raise ProviderNotFound(
                f"unknown provider {slug[:80]!r}", hint=f"known providers: {', '.join(sorted(known))}"
            )


def _config_view(request: Ask, key: ProviderKeyView) -> Json:
    id = f"{key.provider}/{key.alias}"
    return {
        "id": id,
        "alias": key.alias,
        "default_config": key.alias == DEFAULT_ALIAS,
        "gateway_id": request.parts["gateway"],
        "modified_at": iso(key.created),
        "provider_slug": key.provider,
        "secret_id": id,
        "secret_preview": HIDDEN,
    }
