"""The layer that checks whether the caller may use this gateway, provider and model."""

from __future__ import annotations

from collections.abc import Awaitable

from emberline.core.errors import Unauthorized
from emberline.gateway.core.errors import Forbidden
from emberline.gateway.core.identity import ALLOW_ALL, allows_model
from emberline.gateway.core.request import VIRTUAL_PROVIDERS, GatewayReply, GatewayRequest, Handler

ALLOW_MODEL_HINT = "use a different key, or add the model to allowed_models of the key or of the gateway"


def check_permissions(inner: Handler) -> Handler:
    def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
        identity = call.identity
        if call.settings.authentication and identity.kind == "anonymous":
            raise Unauthorized(
                f"gateway {call.gateway[:80]!r} requires a key and the request has none",
                hint="send cf-aig-authorization: Bearer KEY, or the key as the API key",
            )
        if not identity.can_use_models:
            raise Forbidden(
                f"key {identity.name!r} is an admin key, which cannot be used for requests to models",
                hint="send a key that may use models",
            )
        if not identity.may_use_gateway(call.account, call.gateway):
            raise Forbidden(
                f"key {identity.name!r} may not use gateway {call.gateway!r} of account {call.account!r}",
                hint="use a different key, or add the gateway to this key",
            )
        steps = {(step.provider, step.model) for step in call.steps} if call.steps else ((call.provider, call.model),)
        for provider, model in steps:
            if provider in VIRTUAL_PROVIDERS:
                continue  # the models of a route or pool are checked when it has chosen one
            if not identity.may_use_model(provider, model):
                raise Forbidden(
                    f"key {identity.name!r} may not use model {provider}/{model}"[:300], hint=ALLOW_MODEL_HINT
                )
            if not _is_model_allowed(call, provider, model):
                raise Forbidden(
                    f"model {provider}/{model} is not allowed by this gateway or by the request's headers"[:300],
                    hint="add the model to allowed_models of the gateway, or of the cf-aig-allowed-models header",
                )
        return inner(call)

    return handle


def is_permitted(call: GatewayRequest, provider: str, model: str) -> bool:
    return call.identity.may_use_model(provider, model) and _is_model_allowed(call, provider, model)


def _is_model_allowed(call: GatewayRequest, provider: str, model: str) -> bool:
    """Return whether both the gateway's settings and the options in the request's headers allow the model."""
    settings, options = call.settings, call.options
    return allows_model(settings.allowed_providers, settings.allowed_models, provider, model) and allows_model(
        options.allowed_providers or ALLOW_ALL, options.allowed_models or ALLOW_ALL, provider, model
    )
