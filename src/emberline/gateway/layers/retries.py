"""RetryHandler: the innermost handler. It sends a request to its provider and retries failures.

A whole reply is returned after it has passed all checks. A streamed reply is returned after its first content arrived.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

from emberline.core.clock import Clock
from emberline.core.error_texts import printable_error
from emberline.core.errors import DeadlineExceeded
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.gateway.core.errors import ProviderErrorReply, UpstreamBroken, UpstreamFailed
from emberline.gateway.core.request import GatewayReply, GatewayRequest, ProviderAttempt
from emberline.gateway.costs.billing import PriceSource, set_cost
from emberline.gateway.error_replies import read_provider_error
from emberline.gateway.keys.provider_keys import ProviderKeySelector, is_caller_key
from emberline.gateway.providers.base import CHANGED_HEADER, NOT_FORWARDED_HEADERS, Provider, list_credentials
from emberline.gateway.providers.breakers import ProviderBreakers
from emberline.gateway.providers.provider_call import (
    ProviderCall,
    build_provider_call,
    build_provider_call_offloaded,
    safe_header,
)
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.streams.aws_eventstream_meter import EventStreamMeter
from emberline.gateway.streams.meter import RawReplyMeter, StreamMeter, check_reply
from emberline.gateway.streams.provider_stream import ProviderStream
from emberline.gateway.upstream.client import UpstreamClient
from emberline.net.client_response import HTTPClientResponse

MAX_REPLY_BYTES = 64 << 20  # of a reply that is not streamed
MAX_ERROR_BYTES = 1 << 20
ERROR_BODY_TIMEOUT_S = 10.0
MAX_RETRY_AFTER_S = 2.0  # with a longer Retry-After the next step is tried instead, if there is one
EVENT_STREAM_TYPE = "text/event-stream"
_DROPPED_HEADERS = NOT_FORWARDED_HEADERS | {
    "content-encoding",
    "set-cookie",
    "server",
    "date",
    "alt-svc",
    "strict-transport-security",
}


def _is_streamed(call: GatewayRequest, response: HTTPClientResponse) -> bool:
    """Return whether the reply is forwarded in chunks.

    Such a reply is a stream, or has an unknown dialect (wire format) and is not JSON.
    """
    return call.stream or (call.dialect == "raw" and response.content_type != "application/json")


class RetryHandler:
    """Sends a request to its provider through circuit breakers, with the configured number of attempts."""

    def __init__(
        self,
        registry: ProviderRegistry,
        key_selector: ProviderKeySelector,
        upstream: UpstreamClient,
        prices: PriceSource,
        clock: Clock,
        wall: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._registry = registry
        self._key_selector = key_selector
        self._upstream = upstream
        self._prices = prices
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self.breakers = ProviderBreakers(clock)

    async def __call__(self, call: GatewayRequest) -> GatewayReply:
        provider = self._registry.find_provider(call.provider, call.settings)
        key = await self._key_selector.select_key(call, provider)
        max_output = self._prices.max_output(call.provider, call.model)
        call.reply_headers.pop(CHANGED_HEADER, None)  # an earlier step may have set it
        arguments = (call, provider, key, max_output, int(self._wall.now()))
        provider_call = (
            build_provider_call(*arguments)
            if len(call.body) < LARGE_INPUT_BYTES
            else await build_provider_call_offloaded(*arguments)
        )
        if CHANGED_HEADER in call.reply_headers:
            call.reply_headers[CHANGED_HEADER] = safe_header(call.reply_headers[CHANGED_HEADER])
        attempts = call.options.max_attempts or call.settings.retries.attempts
        for attempt in range(attempts):
            started_at = self._clock.now()
            try:
                reply = await self.breakers.run_with_breaker(
                    call, provider, key, partial(self._attempt_call, call, provider, provider_call)
                )
            except UpstreamFailed as e:
                e.provider = provider.slug
                self._record_attempt(
                    call, attempt, started_at, e.status if isinstance(e, ProviderErrorReply) else 0, e.code
                )
                if attempt + 1 == attempts or (delay := self._retry_delay_s(call, attempt, e)) is None:
                    if (error := provider.convert_error(e, is_caller_key=is_caller_key(call, key))) is not e:
                        raise error from e
                    raise
                await self._sleep(delay)
            else:
                self._record_attempt(call, attempt, started_at, reply.status, "answered")
                return reply
        raise AssertionError("the loop of attempts ended without a reply or an error")

    def _record_attempt(self, call: GatewayRequest, attempt: int, started_at: float, status: int, outcome: str) -> None:
        seconds = self._clock.now() - started_at
        key = call.options.byok_alias or ""
        call.attempts.append(
            ProviderAttempt(call.provider, call.model, call.step_index, attempt, status, outcome, seconds, key)
        )

    def _retry_delay_s(self, call: GatewayRequest, attempt: int, error: UpstreamFailed) -> float | None:
        """Return the seconds until the next attempt, or None if no further attempt is allowed."""
        if not error.retryable:
            return None
        retries = call.settings.retries
        base = retries.delay if call.options.retry_delay is None else call.options.retry_delay
        factor = {"constant": 1, "linear": attempt + 1, "exponential": 2**attempt}[
            call.options.backoff or retries.backoff
        ]
        # Jitter: calls that failed together must not retry together.
        delay = base * factor * random.uniform(0.8, 1.2)
        if isinstance(error, ProviderErrorReply) and error.retry_after is not None:
            if error.retry_after > MAX_RETRY_AFTER_S and not call.is_last_step:
                return None
            delay = max(delay, error.retry_after)
        return delay if self._clock.now() + delay < call.deadline else None

    async def _attempt_call(
        self, call: GatewayRequest, provider: Provider, provider_call: ProviderCall, on_failure: Callable[[], None]
    ) -> GatewayReply:
        now = self._clock.now()
        left = call.deadline - now
        if left <= 0:
            raise DeadlineExceeded(
                f"provider {call.provider!r} did not reply within {call.settings.timeouts.total:.3g} s",
                hint="raise the gateway's setting timeouts.total",
            )
        first = call.options.request_timeout or (call.settings.timeouts.first_byte if call.stream else left)
        response = await provider.send(provider_call.request, self._upstream, min(first, left), self._wall.now())
        try:
            if response.status >= 400:
                body = await response.read_all(min(left, ERROR_BODY_TIMEOUT_S), MAX_ERROR_BYTES)
                is_own_error = call.is_dialect_endpoint and (
                    provider.has_own_error_format or provider_call.request.decoder is not None
                )
                error_dialect = "raw" if is_own_error else provider_call.dialect
                secrets = list_credentials(provider_call.request.headers)
                raise read_provider_error(
                    call.provider, response.status, response.headers, body, error_dialect, secrets
                )
            if 300 <= response.status < 400:
                raise UpstreamBroken(
                    f"provider {call.provider!r} replied with status {response.status}, but redirects are not followed"
                )
            if _is_streamed(call, response):
                return await self._start_stream(call, provider_call, response, now + first, on_failure)
            return await self._read_whole_reply(call, provider_call, response)
        except BaseException:
            response.close()
            raise

    async def _read_whole_reply(
        self, call: GatewayRequest, provider_call: ProviderCall, response: HTTPClientResponse
    ) -> GatewayReply:
        if provider_call.dialect != "raw" and response.content_type != "application/json":
            raise UpstreamBroken(
                f"the reply of provider {call.provider!r} must have content type application/json, not"
                f" {response.content_type or '(none)'}"
            )
        left = call.deadline - self._clock.now()
        body = await response.read_all(min(max(left, 0.0), call.settings.timeouts.between_events), MAX_REPLY_BYTES)
        if len(body) < LARGE_INPUT_BYTES:
            usage, model = check_reply(provider_call.dialect, body)
            response.close()
            translated, lost = provider_call.convert_reply(body)
        else:
            usage, model = await offload.run(len(body), check_reply, provider_call.dialect, body)
            response.close()
            translated, lost = await provider_call.convert_reply_offloaded(body)
        reply = self._make_reply(call, response, translated)
        if lost:
            call.reply_headers[CHANGED_HEADER] = safe_header(
                ", ".join(filter(None, (call.reply_headers.get(CHANGED_HEADER), lost)))
            )
        reply.usage, reply.model = usage if call.method == "POST" else None, model or call.model
        reply.ended = "complete"
        set_cost(call, reply, self._prices)
        return reply

    async def _start_stream(
        self,
        call: GatewayRequest,
        provider_call: ProviderCall,
        response: HTTPClientResponse,
        first_content_deadline: float,
        on_failure: Callable[[], None],
    ) -> GatewayReply:
        if response.content_type == EVENT_STREAM_TYPE:
            meter: StreamMeter = StreamMeter(provider_call.dialect, hide_usage=provider_call.hide_usage)
        elif provider_call.dialect == "raw":
            meter = EventStreamMeter() if response.content_type == EventStreamMeter.content_type else RawReplyMeter()
        else:
            raise UpstreamBroken(
                f"the streamed reply of provider {call.provider!r} must have content type {EVENT_STREAM_TYPE}, not"
                f" {response.content_type or '(none)'}"
            )
        stream = ProviderStream(call, response, meter, provider_call.make_translator(), self._clock)

        def settle(stream: ProviderStream, ended: str, code: str) -> None:
            reply.ended, reply.error, reply.error_message = ended, code, printable_error(stream.error_message)
            tokens = call.body_summary.input_tokens if call.body_summary is not None else None
            if call.method == "POST":  # a GET reports the usage of an earlier request
                reply.usage, reply.estimated = stream.meter.usage(call.body, tokens)
            set_cost(call, reply, self._prices)
            if ended == "cut" and self._clock.now() < call.deadline:  # a slow reader can reach the deadline as well
                on_failure()

        await stream.wait_for_content(first_content_deadline, settle)
        reply = self._make_reply(call, response, stream)
        reply.model = meter.state.model or call.model
        return reply

    def _make_reply(
        self, call: GatewayRequest, response: HTTPClientResponse, body: bytes | ProviderStream
    ) -> GatewayReply:
        headers = {name: value for name, value in response.headers.items() if name not in _DROPPED_HEADERS}
        reply = GatewayReply(response.status, headers, body, provider=call.provider, step_index=call.step_index)
        reply.first_byte_s = self._clock.now() - call.started_at
        return reply
