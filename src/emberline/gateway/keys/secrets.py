"""Secrets: which provider's key a call is sent with. The caller's own, if it came with one for this provider; else one
that is stored; else the one of the configuration."""

from __future__ import annotations

from typing import Protocol

from emberline.gateway.call import Call
from emberline.gateway.errors import KeyMissing
from emberline.gateway.providers.base import CREDENTIALS, Provider
from emberline.gateway.providers.registry import NOTHING

DEFAULT_ALIAS = "default"


class Vault(Protocol):
    async def reveal(self, account: str, provider: str, alias: str) -> str | None: ...


def own_key(call: Call) -> str | None:
    """What the caller gave for the provider, in whichever header."""
    for name in CREDENTIALS:
        if given := call.headers.get(name, ""):
            return given.removeprefix("Bearer ")
    if call.provider == "google-ai-studio":  # whose own examples have it in the URL
        return next((each[4:] for each in call.query.split("&") if each.startswith("key=")), None)
    return None


class Secrets:
    def __init__(self, vault: Vault | None = None) -> None:
        self._vault = vault

    async def key(self, call: Call, provider: Provider) -> str | None:
        """None: the caller's own is in its headers as the provider wants it, or none is needed. KeyMissing: there is
        none, or not by the name that was asked for."""
        alias = call.options.byok_alias
        if alias is None and (own := own_key(call)) is not None:
            return own if call.plain else None
        if self._vault is not None:
            stored = await self._vault.reveal(call.account, provider.slug, alias or DEFAULT_ALIAS)
            if stored is not None:
                return stored
        if alias not in (None, DEFAULT_ALIAS):
            what, hint = f"there is no key {alias!r} for {provider.slug}", "see cf-aig-byok-alias"
            raise KeyMissing(what, provider=provider.slug, hint=hint)
        key = call.settings.providers.get(provider.slug, NOTHING).key
        if key is None and provider.needs_key and own_key(call) is None:
            what, hint = f"there is no key for {provider.slug}", "store one, or send it with the request"
            raise KeyMissing(what, provider=provider.slug, hint=hint)
        return key
