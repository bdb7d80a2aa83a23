"""The provider and the model that the name of a model stands for."""

from __future__ import annotations

from emberline.core.errors import InvalidRequest
from emberline.gateway.call import POOL, VIRTUAL
from emberline.gateway.providers.registry import KNOWN
from emberline.gateway.settings import Settings


def resolve(model: str, settings: Settings, *, named: bool = False) -> tuple[str, str]:
    """The provider and its own name of a model. `named`: it must say its provider."""
    model = settings.models.get(model, model)
    if model in settings.pools:
        return POOL, model
    provider, slash, rest = model.partition("/")
    if slash and (provider in KNOWN or provider in settings.providers or provider in VIRTUAL):
        return provider, rest
    if named:
        known = ", ".join(sorted({*KNOWN, *settings.providers}))
        raise InvalidRequest(
            f"model is {model[:100]!r}: it must be PROVIDER/MODEL", param="model", hint=f"known are {known}"
        )
    return settings.default_provider, model
