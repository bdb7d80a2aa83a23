"""Passes a provider's stream on to a client, translated if their wire formats differ.

Nothing is sent to the client before the first content, so that another provider can still be tried. A later failure is
sent as an error event in the client's wire format.
"""

from __future__ import annotations

from collections.abc import Callable

from emberline.core.clock import Clock
from emberline.core.errors import WorkTooLarge
from emberline.core.offload import HUGE_INPUT_BYTES, offload
from emberline.gateway.core.errors import UpstreamBroken, UpstreamFailed, UpstreamTimeout
from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.dialects.translate import StreamTranslator
from emberline.gateway.error_replies import error_event
from emberline.gateway.streams.meter import StreamMeter
from emberline.net.client_response import HTTPClientResponse

CLOSE_GRACE_S = 1.0  # from the stream's end event to the end of the connection
MAX_BYTES_BEFORE_CONTENT = 4 << 20

StreamEndCallback = Callable[["ProviderStream", str, str], None]  # the stream, its outcome, and the error code


class ProviderStream:
    """One provider's stream on its way to the client."""

    def __init__(
        self,
        call: GatewayRequest,
        incoming: HTTPClientResponse,
        meter: StreamMeter,
        translator: StreamTranslator | None,
        clock: Clock,
    ) -> None:
        self.meter = meter
        self.error_message = ""  # of the error that ended the stream, for the log
        self._call = call
        self._incoming = incoming
        self._translator = translator
        self._clock = clock
        self._pending: list[bytes] = []  # output before the first content
        self._is_closed = False
        self._silent_s = 0.0  # seconds since the last event with data
        self._on_end: StreamEndCallback | None = None

    async def wait_for_content(self, deadline: float, on_end: StreamEndCallback) -> None:
        """Read until the stream has content or a valid end. Raise UpstreamFailed if the stream fails before that.

        If this call succeeds, `on_end` is called once when the stream ends.
        """
        state, received = self.meter.state, 0
        while not state.has_content and not state.has_ended:
            events = await self._read_events(min(deadline, self._call.deadline), before_content=True)
            if state.error:
                raise UpstreamBroken(f"the provider sent an error event before any content: {state.error}")
            if events is None:
                self.meter.end()
            if self.meter.broken is not None:
                raise self.meter.broken
            if events:
                received += len(events)
                if received > MAX_BYTES_BEFORE_CONTENT and not (state.has_content or state.has_ended):
                    raise UpstreamBroken(f"the stream has no content in its first {received} bytes")
                self._pending.append(
                    self._translate(events)
                    if len(events) < HUGE_INPUT_BYTES
                    else await self._translate_offloaded(events)
                )
        self._on_end = on_end

    async def _read_events(self, deadline: float, before_content: bool = False) -> bytes | None:
        """Return complete events, or None at the end of the stream; raise UpstreamTimeout if no data arrives."""
        meter, timeouts = self.meter, self._call.settings.timeouts
        now = self._clock.now()
        idle_deadline = now - self._silent_s + (CLOSE_GRACE_S if meter.state.has_ended else timeouts.between_events)
        while True:
            try:
                data = await self._incoming.read((idle_deadline if idle_deadline < deadline else deadline) - now)
            except UpstreamTimeout:
                if deadline <= idle_deadline:
                    raise UpstreamTimeout(
                        "the stream had no content before the deadline"
                        if before_content
                        else f"the stream did not end within {timeouts.total:.3g} s"
                    ) from None
                raise UpstreamTimeout(f"the provider sent no event for {timeouts.between_events:.3g} s") from None
            if not data:
                return None
            previous, data_events = now, meter.data_events
            now = self._clock.now()
            events = meter.push(data) if not meter.needs_offload(data) else await meter.push_offloaded(data)
            self._silent_s = self._silent_s + now - previous if meter.data_events == data_events else 0.0
            if events or meter.broken is not None:
                return events

    def _translate(self, events: bytes) -> bytes:
        """Return the events in the client's wire format."""
        return events if self._translator is None else self._translator.push(events)

    async def _translate_offloaded(self, events: bytes) -> bytes:
        """Translate large events in a child process, so that the event loop is not blocked."""
        if self._translator is None:
            return events
        try:
            self._translator, output = await offload.run(len(events), translate_chunk, self._translator, events)
        except WorkTooLarge as e:
            raise UpstreamBroken(f"an event of the stream is too large to translate: {e.message}") from e
        return output

    def __aiter__(self) -> ProviderStream:
        return self

    async def __anext__(self) -> bytes:
        if self._pending:
            pending, self._pending = b"".join(self._pending), []
            if pending:
                return pending
        while not self._is_closed:
            try:
                events = await self._read_events(self._call.deadline) if self.meter.broken is None else None
                is_large = events is not None and len(events) >= HUGE_INPUT_BYTES
                if output := self._next_output(
                    events, await self._translate_offloaded(events) if events and is_large else None
                ):
                    return output
            except UpstreamFailed as e:
                if not self.meter.state.has_ended:
                    return self._end_with_error(e)
                self._finish_stream(
                    "complete", ""
                )  # the end event was received: only the connection did not close cleanly
        raise StopAsyncIteration

    def _next_output(self, events: bytes | None, output: bytes | None = None) -> bytes:
        """Return the next bytes for the client: `output` if given, else `events` after translation."""
        meter = self.meter
        if events is None and meter.broken is None:
            meter.end()
        if meter.broken is not None and not events:
            raise meter.broken  # only after the valid events were passed on
        if events is None:
            output = self._translate(meter.missing_end) if meter.missing_end else b""
            if self._translator is not None:
                output += self._translator.end()
            self._finish_stream("complete", "")
            return output
        output = self._translate(events) if output is None else output
        if meter.state.error:  # the provider's own error event is passed on as the last event
            self.error_message = f"provider {self._call.provider} ended the stream with an error: {meter.state.error}"
            self._finish_stream("cut", UpstreamBroken.code)
        return output

    def _end_with_error(self, error: UpstreamFailed) -> bytes:
        self.error_message = str(error)
        self._finish_stream("cut", error.code)
        if self._translator is not None:
            final_event: bytes | None = self._translator.write_error(error)
        else:
            final_event = error_event(self._call.dialect, error)
        if not final_event:
            raise error
        return final_event

    def _finish_stream(self, outcome: str, code: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._incoming.close()
        if self._on_end is not None:
            self._on_end(self, outcome, code)

    async def aclose(self) -> None:
        """Close the stream before its end, because the client disconnected."""
        self._finish_stream("complete" if self.meter.state.has_ended else "left", "")


def translate_chunk(translator: StreamTranslator, data: bytes) -> tuple[StreamTranslator, bytes]:
    """Translate `data` and return the changed translator and its output; runs in a child process."""
    output = translator.push(data)
    return translator, output
