"""CloudflareProviderEndpoints: stored provider keys (Cloudflare's `provider_configs`) and provider URLs.

A stored key belongs to the account. Every gateway of the account can use the key, although the path names one gateway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.admin_request import AdminRequest, check_name
from emberline.gateway.admin.cloudflare import (
    PAGE_PARAMETERS,
    ROOT,
    PagedResult,
    select_page,
    to_iso_time,
    with_path_parameters,
)
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.gateways import GatewayEndpoints
from emberline.gateway.admin.keys import ProviderKeyEndpoints, build_provider_key_view
from emberline.gateway.admin.schemas import ProviderKeySpec, ProviderKeyView, StrictStruct
from emberline.gateway.core.errors import ProviderNotFound
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.keys.provider_keys import DEFAULT_ALIAS
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG
from emberline.gateway.routes.universal import COMPAT
from emberline.gateway.settings_checks import CUSTOM_PREFIX

Json = dict[str, Any]
MASKED_SECRET = "****"  # preview of a key, which is stored encrypted


class ProviderConfigSpec(StrictStruct, frozen=True, kw_only=True):
    alias: str
    default_config: bool
    provider_slug: str
    secret: Annotated[str, msgspec.Meta(min_length=1, max_length=16_384)]
    secret_id: None = None  # not supported: id in Cloudflare's secrets store
    rate_limit: Literal[0] | None = None  # not supported: limits are rules of a gateway
    rate_limit_period: Literal[0] | None = None


class CloudflareProviderEndpoints:
    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._gateways = GatewayEndpoints(context)
        self._keys = ProviderKeyEndpoints(context)

    def endpoints(self) -> list[AdminEndpoint]:
        gateway = f"{ROOT}/gateways/{{gateway}}"
        configs = f"{gateway}/provider_configs"
        endpoints = [
            AdminEndpoint(
                "GET", configs, "List stored provider keys, without secrets", self.list_configs, query=PAGE_PARAMETERS
            ),
            AdminEndpoint("POST", configs, "Store a provider key, encrypted", self.create_config, ProviderConfigSpec),
            AdminEndpoint(
                "GET", f"{gateway}/url/{{provider}}", "Get the base URL of a provider's paths", self.get_provider_url
            ),
        ]
        return [replace(each, uses_cloudflare_envelope=True) for each in endpoints]

    async def list_configs(self, request: AdminRequest) -> PagedResult:
        await self._gateways.get(request)
        found = [
            build_provider_key_view(each)
            for each in await self._context.list_all_documents("provider_key", request.account)
        ]
        return select_page(request, [_build_config_view(request, each) for each in found])

    async def create_config(self, request: AdminRequest) -> Json:
        """Store a provider key.

        If `default_config` is true, store the key also under the alias `default`. Requests that name no alias use the
        key with the alias `default`.
        """
        settings: GatewaySettings = (await self._gateways.get(request)).value
        spec = request.decode_body(ProviderConfigSpec)
        await self._check_provider(request, spec.provider_slug, settings)
        if spec.alias == DEFAULT_ALIAS and not spec.default_config:
            hint = "use another alias, or set default_config to true"
            raise InvalidRequest(
                f"default_config must not be false for the alias {DEFAULT_ALIAS!r}, which requests use by default",
                param="default_config",
                hint=hint,
            )
        key = ProviderKeySpec(secret=spec.secret)
        aliases = [check_name(spec.alias, "alias"), *([DEFAULT_ALIAS] if spec.default_config else [])]
        for alias in dict.fromkeys(aliases):
            stored = await self._keys.put(
                with_path_parameters(request, {"provider": spec.provider_slug, "alias": alias}, key)
            )
        return {**_build_config_view(request, stored), "alias": spec.alias, "default_config": spec.default_config}

    async def get_provider_url(self, request: AdminRequest) -> str:
        settings: GatewaySettings = (await self._gateways.get(request)).value
        provider = request.path_parameters["provider"]
        if provider != COMPAT:
            await self._check_provider(request, provider, settings)
        return f"{request.origin}/v1/{request.account}/{request.path_parameters['gateway']}/{provider}"

    async def _check_provider(self, request: AdminRequest, slug: str, settings: GatewaySettings) -> None:
        custom = {
            f"{CUSTOM_PREFIX}{each.id}"
            for each in await self._context.list_all_documents("custom_provider", request.account)
        }
        known = {*PROVIDERS_BY_SLUG, *settings.providers, *custom}
        if slug not in known:
            raise ProviderNotFound(
                f"unknown provider {slug[:80]!r}", hint=f"known providers: {', '.join(sorted(known))}"
            )


def _build_config_view(request: AdminRequest, key: ProviderKeyView) -> Json:
    id = f"{key.provider}/{key.alias}"
    return {
        "id": id,
        "alias": key.alias,
        "default_config": key.alias == DEFAULT_ALIAS,
        "gateway_id": request.path_parameters["gateway"],
        "modified_at": to_iso_time(key.created),
        "provider_slug": key.provider,
        "secret_id": id,
        "secret_preview": MASKED_SECRET,
    }
