"""Resolves the model name of a request to a provider and its own model name."""

from __future__ import annotations

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.request import POOL, VIRTUAL_PROVIDERS
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG


def resolve_model(model: str, settings: GatewaySettings, *, require_provider: bool = False) -> tuple[str, str]:
    """Return the provider and its own name of the model.

    With `require_provider`, InvalidRequest is raised if the name has no known provider; otherwise the default provider
    is used.
    """
    model = settings.models.get(model, model)
    if model in settings.pools:
        return POOL, model
    provider, slash, rest = model.partition("/")
    if slash and (provider in PROVIDERS_BY_SLUG or provider in settings.providers or provider in VIRTUAL_PROVIDERS):
        return provider, rest
    if require_provider:
        known = ", ".join(sorted({*PROVIDERS_BY_SLUG, *settings.providers}))
        raise InvalidRequest(
            f"model {model[:100]!r} names no provider: it must be PROVIDER/MODEL",
            param="model",
            hint=f"providers: {known}",
        )
    return settings.default_provider, model
