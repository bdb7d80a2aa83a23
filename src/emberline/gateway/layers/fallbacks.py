"""The layer that tries the steps of a request in order until one answers.

A step is a pair of provider and model. An error that the request itself caused is returned at once. A request that a
provider rejected for its content is not sent to a different provider, which might be less strict.
"""

from __future__ import annotations

from collections.abc import Awaitable

from emberline.gateway.core.errors import ProviderErrorReply, UpstreamFailed
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler, RequestStep
from emberline.gateway.layers.permissions import is_permitted
from emberline.gateway.providers.base import CHANGED_HEADER


def try_fallbacks(inner: Handler) -> Handler:
    def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
        steps = call.steps or fallback_steps(call)
        if len(steps) == 1:
            return inner(call_for_step(call, steps[0], 0, True))
        return try_steps(call, steps)

    async def try_steps(call: GatewayRequest, steps: tuple[RequestStep, ...]) -> GatewayReply:
        for number, step in enumerate(steps):
            last = number + 1 == len(steps)
            try:
                return await inner(call_for_step(call, step, number, last))
            except UpstreamFailed as e:
                if last or not can_fall_back(e, step):
                    raise
                call.reply_headers.pop(CHANGED_HEADER, None)  # changes made for the provider that failed
        raise AssertionError("unreachable")

    return handle


def can_fall_back(error: UpstreamFailed, step: RequestStep) -> bool:
    """Return whether the next step may be tried after this error."""
    if not isinstance(error, ProviderErrorReply):
        return True
    if error.reason == "request":
        return step.body is not None  # the next step has its own body
    return error.reason != "filtered"


def fallback_steps(call: GatewayRequest) -> tuple[RequestStep, ...]:
    """Return the step that the request names, followed by the fallbacks that are configured for its model."""
    first = RequestStep(call.provider, call.model)
    if call.dialect == "raw" and not call.is_dialect_endpoint:  # no other provider has this path
        return (first,)
    names = (f"{call.provider}/{call.model}", call.model)
    for fallback in call.settings.fallbacks:
        if any(_matches_pattern(fallback.model, name) for name in names):
            others = (target.split("/", 1) for target in fallback.to)
            return (
                first,
                *(RequestStep(provider, model) for provider, model in others if is_permitted(call, provider, model)),
            )
    return (first,)


def _matches_pattern(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def call_for_step(call: GatewayRequest, step: RequestStep, step_number: int, is_last: bool) -> GatewayRequest:
    """Return a copy of the request for this step.

    The copy shares the list of attempts and the reply headers.
    """
    if step_number == 0 and step.body is None:
        return call if is_last else call.with_changes(is_last_step=False)
    headers = step.headers
    if headers is None:  # credentials for another provider are not passed on
        headers = {name: value for name, value in call.headers.items() if name in _SHARED_HEADERS}
    return call.with_changes(
        provider=step.provider,
        model=step.model,
        endpoint=call.endpoint if step.endpoint is None else step.endpoint,
        dialect=step.dialect or call.dialect,
        headers=headers,
        body=call.body if step.body is None else step.body,
        body_fields=call.body_fields if step.body is None else step.body_fields,
        body_summary=call.body_summary if step.body is None else step.body_summary,
        stream=call.stream if step.stream is None else step.stream,
        options=step.options or call.options,
        is_dialect_endpoint=step.endpoint is None or step.is_dialect_endpoint,
        step_index=step_number,
        is_last_step=is_last,
    )


_SHARED_HEADERS = ("content-type", "accept", "user-agent")
