"""Providers of a gateway as Cloudflare's clients speak of them: stored keys (`provider_configs`) and endpoints (`url`).

Stored keys belong to the account here: one that is stored below a gateway can be used by every gateway of the account.
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
HIDDEN = "****"  # in place of the beginning of a key, which is not stored in the clear


class ProviderConfigWish(Strict, frozen=True, kw_only=True):
    alias: str
    default_config: bool
    provider_slug: str
    secret: Annotated[str, msgspec.Meta(min_length=1, max_length=16_384)]
    secret_id: None = None  # of Cloudflare's own store of secrets
    rate_limit: Literal[0] | None = None  # limits are rules of a gateway
    rate_limit_period: Literal[0] | None = None


class CloudflareProviders:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._gateways = Gateways(desk)
        self._keys = ProviderKeyDesk(desk)

    def endpoints(self) -> list[Endpoint]:
        gateway = f"{ROOT}/gateways/{{gateway}}"
        configs = f"{gateway}/provider_configs"
        found = [
            Endpoint("GET", configs, "Which providers have keys", self.configs, query=PAGES),
            Endpoint("POST", configs, "Store a provider's key, encrypted", self.create_config, ProviderConfigWish),
            Endpoint("GET", f"{gateway}/url/{{provider}}", "The URL of a provider's paths", self.url),
        ]
        return [replace(each, cloudflare=True) for each in found]

    async def configs(self, ask: Ask) -> Paged:
        await self._gateways.get(ask)
        found = [provider_key_view(each) for each in await self._desk.all("provider_key", ask.account)]
        return numbered(ask, [_config_view(ask, each) for each in found])

    async def create_config(self, ask: Ask) -> Json:
        """A key that is to be the default is stored by the name `default` too, which calls without a name use."""
        settings: Settings = (await self._gateways.get(ask)).value
        wish = ask.read(ProviderConfigWish)
        await self._check_provider(ask, wish.provider_slug, settings)
        if wish.alias == DEFAULT_ALIAS and not wish.default_config:
            hint = "give it another alias, or default_config: true"
            raise InvalidRequest("the key with the alias default is the default one", param="default_config", hint=hint)
        key = ProviderKeyWish(secret=wish.secret)
        aliases = [named(wish.alias, "alias"), *([DEFAULT_ALIAS] if wish.default_config else [])]
        for alias in dict.fromkeys(aliases):
            stored = await self._keys.put(with_parts(ask, {"provider": wish.provider_slug, "alias": alias}, key))
        return {**_config_view(ask, stored), "alias": wish.alias, "default_config": wish.default_config}

    async def url(self, ask: Ask) -> str:
        settings: Settings = (await self._gateways.get(ask)).value
        provider = ask.parts["provider"]
        if provider != COMPAT:
            await self._check_provider(ask, provider, settings)
        return f"{ask.origin}/v1/{ask.account}/{ask.parts['gateway']}/{provider}"

    async def _check_provider(self, ask: Ask, slug: str, settings: Settings) -> None:
        custom = {f"{CUSTOM}{each.id}" for each in await self._desk.all("custom_provider", ask.account)}
        known = {*KNOWN, *settings.providers, *custom}
        if slug not in known:
            raise ProviderNotFound(f"there is no provider {slug[:80]!r}", hint=f"known are {', '.join(sorted(known))}")


def _config_view(ask: Ask, key: ProviderKeyView) -> Json:
    id = f"{key.provider}/{key.alias}"
    return {
        "id": id,
        "alias": key.alias,
        "default_config": key.alias == DEFAULT_ALIAS,
        "gateway_id": ask.parts["gateway"],
        "modified_at": iso(key.created),
        "provider_slug": key.provider,
        "secret_id": id,
        "secret_preview": HIDDEN,
    }
