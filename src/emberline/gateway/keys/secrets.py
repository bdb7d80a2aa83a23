"""ProviderKeySelector: which provider key a request is sent with.

The caller's own key if the request has one, else the stored key, else the key in the configuration.
"""

from __future__ import annotations

from typing import Protocol

from emberline.gateway.call import Call
from emberline.gateway.errors import KeyMissing
from emberline.gateway.providers.base import CREDENTIALS, Provider
from emberline.gateway.providers.registry import NOTHING

DEFAULT_ALIAS = "default"


class Vault(Protocol):
    async def reveal(self, account: str, provider: str, alias: str) -> str | None: ...


def own_key(request: Call) -> str | None:
    """Return the provider key that the caller sent with the request, or None."""
    for name in CREDENTIALS:
        if value := request.headers.get(name, ""):
            return value.removeprefix("Bearer ")
    if request.provider == "google-ai-studio":  # its clients may send the key in the URL
        return next((each[4:] for each in request.query.split("&") if each.startswith("key=")), None)
    return None


class Secrets:
    def __init__(self, source: Vault | None = None) -> None:
        self._source = source

    async def key(self, request: Call, provider: Provider) -> str | None:
        """Return the provider key to send.

        None means that the request's headers have the key already, or that the provider needs none. Raise
        ProviderKeyMissing if there is no key, or no key with the alias that the request names.
        """
        alias = request.options.byok_alias
        if alias is None and (own := own_key(request)) is not None:
            return own if request.plain else None
        if self._source is not None:
            stored = await self._source.reveal(request.account, provider.slug, alias or DEFAULT_ALIAS)
            if stored is not None:
                return stored
        if alias not in (None, DEFAULT_ALIAS):
            message = f"account {request.account!r} has no key with the alias {alias!r} for provider {provider.slug}"
            hint = "store the key under /provider-keys, or correct the header cf-aig-byok-alias"
            raise KeyMissing(message, provider=provider.slug, hint=hint)
        key = request.settings.providers.get(provider.slug, NOTHING).key
        if key is None and provider.needs_key and own_key(request) is None:
            message = f"account {request.account!r} has no key for provider {provider.slug}"
            hint = "store a key under /provider-keys, or send the provider's key with the request"
            raise KeyMissing(message, provider=provider.slug, hint=hint)
        return key
