"""Circuit breakers: a target that failed too often in a row is skipped for a while.

Failures are counted per gateway, provider, model and credential, so that no caller, key or model can block the requests
of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from emberline.core.breaker import CircuitBreaker
from emberline.core.clock import Clock
from emberline.gateway.core.errors import (
    CircuitBreakerOpen,
    ProviderErrorReply,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.providers.base import Provider, caller_key

T = TypeVar("T")

MAX_BREAKERS = 10_000  # callers choose model names, so the number is bounded

BreakerKey = tuple[str, str, str, str, int, int]  # account, gateway, provider's address, key alias, model, credential


def is_caller_timeout(call: GatewayRequest, code: str) -> bool:
    """Return whether `code` is a timeout that the caller set shorter than the gateway's own.

    Such a timeout proves no fault of the provider.
    """
    if code not in (UpstreamTimeout.code, UpstreamUnreachable.code) or call.options.request_timeout is None:
        return False
    timeouts = call.settings.timeouts
    longest = timeouts.first_byte if call.stream else timeouts.total
    return not call.options.timeout_configured and call.options.request_timeout < longest


class ProviderBreakers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._breakers: dict[BreakerKey, CircuitBreaker] = {}

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield each provider address (and key alias) that failed lately, with its number of open breakers."""
        counts: Counter[str] = Counter()
        for (_, _, origin, alias, *_), breaker in self._breakers.items():
            counts[f"{origin} {alias}" if alias else origin] += breaker.state != "closed"
        return iter(counts.items())

    async def guard(
        self,
        call: GatewayRequest,
        provider: Provider,
        key: str | None,
        attempt: Callable[[Callable[[], None]], Awaitable[T]],
    ) -> T:
        """Run `attempt` and count its outcome; raise CircuitBreakerOpen instead while the breaker is open.

        `key` is the provider's key, None if the caller's own is in the headers. `attempt` is called with a function
        that records a failure after its return.
        """
        breaker = self._breakers.get(_breaker_key(call, provider, key)) if self._breakers else None
        if breaker is not None:
            now = self._clock.now()
            if not breaker.allows(now):
                remaining_s = max(0.0, breaker.retry_at - now)
                raise CircuitBreakerOpen(
                    f"{provider.slug} failed {breaker.failures} times in a row for this model and key,"
                    f" so it is skipped for {remaining_s:.2g} s"
                )
            breaker.record_start(now)
        try:
            result = await attempt(lambda: self._record_failure(_breaker_key(call, provider, key), call))
        except UpstreamFailed as e:
            self._record_error(_breaker_key(call, provider, key), call, e)
            raise
        except BaseException:
            if breaker is not None:
                breaker.record_cancellation()
            raise
        if self._breakers:  # rare, so that most requests need not compute a key
            self._record_success(_breaker_key(call, provider, key))
        return result

    def _record_error(self, breaker_key: BreakerKey, call: GatewayRequest, error: UpstreamFailed) -> None:
        reason = error.reason if isinstance(error, ProviderErrorReply) else ""
        if is_caller_timeout(call, error.code) or reason == "busy":
            if (breaker := self._breakers.get(breaker_key)) is not None:
                breaker.record_cancellation()
        elif reason in ("", "server"):
            self._record_failure(breaker_key, call)
        else:
            self._record_success(breaker_key)

    def _record_failure(self, breaker_key: BreakerKey, call: GatewayRequest) -> None:
        breaker = self._breakers.get(breaker_key)
        if breaker is None:
            while len(self._breakers) >= MAX_BREAKERS:
                del self._breakers[next(iter(self._breakers))]
            settings = call.settings.breaker
            breaker = self._breakers[breaker_key] = CircuitBreaker(settings.failures, settings.pause)
        breaker.record_failure(self._clock.now())

    def _record_success(self, breaker_key: BreakerKey) -> None:
        if (breaker := self._breakers.pop(breaker_key, None)) is not None:
            breaker.record_success()


def _breaker_key(call: GatewayRequest, provider: Provider, key: str | None) -> BreakerKey:
    """Return the breaker's key; hashes bound the length of model names and keep credentials secret."""
    target = call.model if call.dialect != "raw" else f"{call.endpoint} {call.model}"
    credential = key if key is not None else caller_key(call)
    return call.account, call.gateway, provider.origin, call.options.byok_alias or "", hash(target), hash(credential)
