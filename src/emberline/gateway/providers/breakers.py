"""Circuit breakers: a target that failed too often in a row is skipped for a while.

Failures are counted per gateway, provider, model and credential, so that no caller, key or model can block the requests
of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from emberline.core.breaker import Breaker
from emberline.core.clock import Clock
from emberline.gateway.call import Call
from emberline.gateway.errors import Refused, Resting, TimedOut, Unreached, UpstreamFailed
from emberline.gateway.keys.secrets import own_key
from emberline.gateway.providers.base import Provider

T = TypeVar("T")

MAX_BREAKERS = 10_000  # callers choose model names, so the number is bounded

Key = tuple[str, str, str, str, int, int]  # account, gateway, provider's address, key alias, model, credential


def is_cut_short(call: Call, code: str) -> bool:
    """Return whether `code` is a timeout that the caller set shorter than the gateway's own.

    Such a timeout proves no fault of the provider.
    """
    if code not in (TimedOut.code, Unreached.code) or call.options.request_timeout is None:
        return False
    timeouts = call.settings.timeouts
    longest = timeouts.first_byte if call.stream else timeouts.total
    return not call.options.timeout_configured and call.options.request_timeout < longest


class Breakers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failing: dict[Key, Breaker] = {}

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield each provider address (and key alias) that failed lately, with its number of open breakers."""
        counts: Counter[str] = Counter()
        for (_, _, origin, alias, *_), breaker in self._failing.items():
            counts[f"{origin} {alias}" if alias else origin] += breaker.state != "closed"
        return iter(counts.items())

    async def guard(
        self, call: Call, provider: Provider, key: str | None, attempt: Callable[[Callable[[], None]], Awaitable[T]]
    ) -> T:
        """Run `attempt` and count its outcome; raise Resting instead while the breaker is open.

        `key` is the provider's key, None if the caller's own is in the headers. `attempt` is called with a function
        that records a failure after its return.
        """
        breaker = self._failing.get(_name(call, provider, key)) if self._failing else None
        if breaker is not None:
            now = self._clock.now()
            if not breaker.allows(now):
                what = f"{provider.slug} failed {breaker.failures} times in a row for this model and key"
                raise Resting(f"{what}, so it is skipped for {max(0.0, breaker.until - now):.2g} s")
            breaker.began(now)
        try:
            done = await attempt(lambda: self._failed(_name(call, provider, key), call))
        except UpstreamFailed as e:
            self._count(_name(call, provider, key), call, e)
            raise
        except BaseException:
            if breaker is not None:
                breaker.neither()
            raise
        if self._failing:  # rare, so that most requests need not compute a key
            self._succeeded(_name(call, provider, key))
        return done

    def _count(self, name: Key, call: Call, error: UpstreamFailed) -> None:
        refusal = error.kind if isinstance(error, Refused) else ""
        if is_cut_short(call, error.code) or refusal == "busy":
            if (breaker := self._failing.get(name)) is not None:
                breaker.neither()
        elif refusal in ("", "server"):
            self._failed(name, call)
        else:
            self._succeeded(name)

    def _failed(self, name: Key, call: Call) -> None:
        breaker = self._failing.get(name)
        if breaker is None:
            while len(self._failing) >= MAX_BREAKERS:
                del self._failing[next(iter(self._failing))]
            settings = call.settings.breaker
            breaker = self._failing[name] = Breaker(settings.failures, settings.pause)
        breaker.failed(self._clock.now())

    def _succeeded(self, name: Key) -> None:
        if (breaker := self._failing.pop(name, None)) is not None:
            breaker.succeeded()


def _name(call: Call, provider: Provider, key: str | None) -> Key:
    """Return the breaker's key; hashes bound the length of model names and keep credentials secret."""
    what = call.model if call.dialect != "raw" else f"{call.endpoint} {call.model}"
    credential = key if key is not None else own_key(call)
    return call.account, call.gateway, provider.origin, call.options.byok_alias or "", hash(what), hash(credential)
