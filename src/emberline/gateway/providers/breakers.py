"""Circuit breakers: a provider that failed several times in a row is skipped for some seconds.

Failures are counted separately for each gateway, provider, model and credential. So failures of one caller, key or
model do not block the requests of other callers.
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


def is_caller_timeout(call: GatewayRequest, error_code: str) -> bool:
    """Return whether the error is a timeout that the caller had set shorter than the gateway's timeout.

    Such a timeout does not show a fault of the provider.
    """
    if error_code not in (UpstreamTimeout.code, UpstreamUnreachable.code) or call.options.request_timeout is None:
        return False
    timeouts = call.settings.timeouts
    longest = timeouts.first_byte if call.stream else timeouts.total
    return not call.options.timeout_configured and call.options.request_timeout < longest


class ProviderBreakers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._breakers: dict[BreakerKey, CircuitBreaker] = {}

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield (provider address and key alias, number of open breakers) for providers that failed recently."""
        counts: Counter[str] = Counter()
        for (_, _, origin, alias, *_), breaker in self._breakers.items():
            counts[f"{origin} {alias}" if alias else origin] += breaker.state != "closed"
        return iter(counts.items())

    async def run_with_breaker(
        self,
        call: GatewayRequest,
        provider: Provider,
        key: str | None,
        attempt: Callable[[Callable[[], None]], Awaitable[T]],
    ) -> T:
        """Run `attempt` and count its success or failure.

        While the breaker is open, raise CircuitBreakerOpen instead.

        `key` is the provider key, or None if the caller's own key is in the headers. `attempt` gets a function as its
        argument; a stream that fails after `attempt` has returned calls that function to record the failure.
        """
        breaker = self._breakers.get(_breaker_key(call, provider, key)) if self._breakers else None
        if breaker is not None:
            now = self._clock.now()
            if not breaker.allows_request(now):
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
    """Return the key that identifies a circuit breaker.

    Model name and credential are hashed: this limits the key's length and keeps credentials secret.
    """
    target = call.model if call.dialect != "raw" else f"{call.endpoint} {call.model}"
    credential = key if key is not None else caller_key(call)
    return call.account, call.gateway, provider.origin, call.options.byok_alias or "", hash(target), hash(credential)
