"""Resolves the model name in a request to a provider and the provider's own name of the model."""

from __future__ import annotations

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.request import POOL, VIRTUAL_PROVIDERS
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG


def resolve_model(model: str, settings: GatewaySettings, *, require_provider: bool = False) -> tuple[str, str]:
    """Return the provider, and the provider's own name of the model.

    A name without a known provider belongs to the default provider. With `require_provider` such a name raises
    InvalidRequest.
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
            f"model must be PROVIDER/MODEL, not {model[:100]!r}",
            param="model",
            hint=f"providers: {known}",
        )
    return settings.default_provider, model
