"""The layer that tries the steps of a call in order until one answers.

An error that the request caused is returned at once, and a request refused for its content is not sent to another
provider, which might be less strict."""

from __future__ import annotations

from collections.abc import Awaitable

from emberline.gateway.call import Call, Handler, Reply, Step
from emberline.gateway.errors import Refused, UpstreamFailed
from emberline.gateway.layers.permitted import permits
from emberline.gateway.providers.base import CHANGED


def routed(inner: Handler) -> Handler:
    def handle(call: Call) -> Awaitable[Reply]:
        steps = call.steps or steps_of(call)
        if len(steps) == 1:
            return inner(at_step(call, steps[0], 0, True))
        return try_steps(call, steps)

    async def try_steps(call: Call, steps: tuple[Step, ...]) -> Reply:
        for number, step in enumerate(steps):
            last = number + 1 == len(steps)
            try:
                return await inner(at_step(call, step, number, last))
            except UpstreamFailed as e:
                if last or not rescuable(e, step):
                    raise
                call.notes.pop(CHANGED, None)  # changes made for the provider that failed
        raise AssertionError("unreachable")

    return handle


def rescuable(error: UpstreamFailed, step: Step) -> bool:
    """Return whether the next step may be tried after this error."""
    if not isinstance(error, Refused):
        return True
    if error.kind == "request":
        return step.body is not None  # the next step has its own body
    return error.kind != "filtered"


def steps_of(call: Call) -> tuple[Step, ...]:
    """Return the step that the call names, followed by the configured fallbacks of its model."""
    first = Step(call.provider, call.model)
    names = (f"{call.provider}/{call.model}", call.model)
    for fallback in call.settings.fallbacks:
        if any(_matches(fallback.model, name) for name in names):
            others = (target.split("/", 1) for target in fallback.to)
            return (first, *(Step(provider, model) for provider, model in others if permits(call, provider, model)))
    return (first,)


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def at_step(call: Call, step: Step, number: int, last: bool) -> Call:
    """Return the call as this step sends it; the trail and the notes are shared."""
    if number == 0 and step.body is None:
        return call if last else call.moved(last=False)
    headers = step.headers
    if headers is None:  # credentials for another provider are not passed on
        headers = {name: value for name, value in call.headers.items() if name in _SHARED}
    return call.moved(
        provider=step.provider,
        model=step.model,
        endpoint=call.endpoint if step.endpoint is None else step.endpoint,
        dialect=step.dialect or call.dialect,
        headers=headers,
        body=call.body if step.body is None else step.body,
        **({} if step.body is None else {"seen": step.seen, "surveyed": step.surveyed}),
        stream=call.stream if step.stream is None else step.stream,
        options=step.options or call.options,
        plain=step.endpoint is None or step.plain,
        step=number,
        last=last,
    )


_SHARED = ("content-type", "accept", "user-agent")
