"""Breakers: who failed too often is left alone for a while. Each place has one, and each key that was asked for by name
one of its own there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from emberline.core.breaker import Breaker
from emberline.core.clock import Clock
from emberline.gateway.call import Call
from emberline.gateway.errors import Refused, Resting, UpstreamFailed
from emberline.gateway.providers.base import Provider

T = TypeVar("T")


class Breakers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._places: dict[str, Breaker] = {}

    def __iter__(self) -> Iterator[tuple[str, Breaker]]:
        return iter(self._places.items())

    async def guard(self, call: Call, provider: Provider, attempt: Callable[[Breaker], Awaitable[T]]) -> T:
        """Resting, or what comes of the attempt; either way the place's breaker learns of it."""
        breaker = self._at(call, provider)
        if not breaker.allows(self._clock.now()):
            raise Resting(f"{provider.slug} failed {breaker.failures} times in a row and is left alone for a while")
        breaker.began(self._clock.now())
        try:
            done = await attempt(breaker)
        except UpstreamFailed as e:
            if isinstance(e, Refused) and e.kind != "server":
                breaker.neither() if e.kind == "busy" else breaker.succeeded()
            else:
                breaker.failed(self._clock.now())
            raise
        except BaseException:
            breaker.neither()
            raise
        breaker.succeeded()
        return done

    def _at(self, call: Call, provider: Provider) -> Breaker:
        place = provider.origin + (f" {alias}" if (alias := call.options.byok_alias) else "")
        if (found := self._places.get(place)) is None:
            settings = call.settings.breaker
            found = self._places[place] = Breaker(settings.failures, settings.pause)
        return found
