"""Permitted: may this caller use this gateway, this provider and this model?"""

from __future__ import annotations

from collections.abc import Awaitable

from emberline.core.errors import Unauthorized
from emberline.gateway.call import VIRTUAL, Call, Handler, Reply
from emberline.gateway.errors import Forbidden
from emberline.gateway.keys.identity import ANY, allows


def permitted(inner: Handler) -> Handler:
    def handle(call: Call) -> Awaitable[Reply]:
        who = call.identity
        if call.settings.authentication and who.kind == "anonymous":
            raise Unauthorized(
                "this gateway needs a key", hint="send cf-aig-authorization: Bearer KEY, or the key as the API key"
            )
        if not who.use:
            raise Forbidden(f"key {who.name!r} is for management only")
        if not who.may_enter(call.account, call.gateway):
            raise Forbidden(f"key {who.name!r} is not for gateway {call.gateway!r} of account {call.account!r}")
        steps = {(step.provider, step.model) for step in call.steps} if call.steps else ((call.provider, call.model),)
        for provider, model in steps:
            if provider in VIRTUAL:
                continue  # the models it stands for are looked at one by one
            if not who.may_use(provider, model):
                raise Forbidden(f"key {who.name!r} may not use {provider}/{model}"[:300])
            if not _allowed(call, provider, model):
                raise Forbidden(f"{provider}/{model} is not allowed here"[:300])
        return inner(call)

    return handle


def permits(call: Call, provider: str, model: str) -> bool:
    return call.identity.may_use(provider, model) and _allowed(call, provider, model)


def _allowed(call: Call, provider: str, model: str) -> bool:
    """By the gateway, and by what the caller itself asked to stay within."""
    settings, asked = call.settings, call.options
    return allows(settings.allowed_providers, settings.allowed_models, provider, model) and allows(
        asked.allowed_providers or ANY, asked.allowed_models or ANY, provider, model
    )
