"""ProviderKeySelector: selects the provider key that is sent with a request.

If the request names the alias of a stored key, that key is sent. Otherwise the caller's own key is sent if the request
has one, else the account's stored key with the alias `default`, else the key in the configuration.
"""

from __future__ import annotations

from typing import Protocol

from emberline.gateway.core.errors import ProviderKeyMissing
from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.providers.base import Provider, caller_key
from emberline.gateway.providers.registry import DEFAULT_PROVIDER_SETTINGS

DEFAULT_ALIAS = "default"


class ProviderKeySource(Protocol):
    async def get_key(self, account: str, provider: str, alias: str) -> str | None: ...


class ProviderKeySelector:
    def __init__(self, source: ProviderKeySource | None = None) -> None:
        self._source = source

    async def select_key(self, request: GatewayRequest, provider: Provider) -> str | None:
        """Return the provider key to send with the request.

        None means that the request's headers contain the key already, or that the provider needs no key. Raise
        ProviderKeyMissing if there is no key, or no key with the alias that the request names.
        """
        alias = request.options.byok_alias
        if alias is None and (own := caller_key(request)) is not None:
            return own if request.is_dialect_endpoint else None
        if self._source is not None:
            stored = await self._source.get_key(request.account, provider.slug, alias or DEFAULT_ALIAS)
            if stored is not None:
                return stored
        if alias not in (None, DEFAULT_ALIAS):
            message = f"account {request.account!r} has no key with the alias {alias!r} for provider {provider.slug}"
            hint = "store the key under /provider-keys, or correct the header cf-aig-byok-alias"
            raise ProviderKeyMissing(message, provider=provider.slug, hint=hint)
        key = request.settings.providers.get(provider.slug, DEFAULT_PROVIDER_SETTINGS).key
        if key is None and provider.needs_key and caller_key(request) is None:
            message = f"account {request.account!r} has no key for provider {provider.slug}"
            hint = "store a key under /provider-keys, or send the provider's key with the request"
            raise ProviderKeyMissing(message, provider=provider.slug, hint=hint)
        return key


def is_caller_key(request: GatewayRequest, key: str | None) -> bool:
    """Return whether the key that `select_key` returned is the one that the caller sent with the request."""
    sent = caller_key(request)
    return sent is not None and key in (None, sent)


def uses_caller_credentials(request: GatewayRequest, provider: Provider) -> bool:
    """Return whether the request reaches its provider with nothing but the caller's own provider key."""
    has_own_key = caller_key(request) is not None and request.options.byok_alias is None
    return has_own_key and provider.needs_key and not provider.has_configured_headers
