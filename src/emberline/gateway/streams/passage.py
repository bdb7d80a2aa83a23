"""Passes a provider's stream on to a client, translated if their wire formats differ.

Nothing is sent to the client before the first content, so that another provider can still be tried. A later failure is
sent as an error event in the client's wire format.
"""

from __future__ import annotations

from collections.abc import Callable

from emberline.core.clock import Clock
from emberline.core.errors import WorkTooLarge
from emberline.core.offload import HUGE, offload
from emberline.gateway.call import Call
from emberline.gateway.dialects.translate import StreamTranslator
from emberline.gateway.errors import Broken, TimedOut, UpstreamFailed
from emberline.gateway.refusal import last_words
from emberline.gateway.streams.meter import Meter
from emberline.gateway.upstream.upstream import Incoming

GRACE = 1.0  # from the stream's end event to the end of the connection
MOST = 4 << 20

Settle = Callable[["Passage", str, str], None]  # the stream, its outcome, and the error code


class Passage:
    def __init__(
        self, call: Call, incoming: Incoming, meter: Meter, translator: StreamTranslator | None, clock: Clock
    ) -> None:
        self.meter = meter
        self._call = call
        self._incoming = incoming
        self._translator = translator
        self._clock = clock
        self._kept: list[bytes] = []  # output before the first content
        self._over = False
        self._silence = 0.0  # seconds since the last event with data
        self._settle: Settle | None = None

    async def begin(self, deadline: float, on_end: Settle) -> None:
        """Read until the first content or a valid end; raise UpstreamFailed if neither comes.

        `on_end` is called once when the stream ends, if this succeeds.
        """
        state, received = self.meter.signs, 0
        while not state.begun and not state.ended:
            passed = await self._more(min(deadline, self._call.deadline), first=True)
            if state.failed:
                raise Broken(f"the provider sent an error event before any content: {state.failed}")
            if passed is None:
                self.meter.end()
            if self.meter.broken is not None:
                raise self.meter.broken
            if passed:
                received += len(passed)
                if received > MOST and not (state.begun or state.ended):
                    raise Broken(f"the stream has no content in its first {received} bytes")
                self._kept.append(self._said(passed) if len(passed) < HUGE else await self._said_apart(passed))
        self._settle = on_end

    async def _more(self, deadline: float, first: bool = False) -> bytes | None:
        """Return complete events, None at the end; raise TimedOut if no event with data arrives in time."""
        meter, timeouts = self.meter, self._call.settings.timeouts
        now = self._clock.now()
        idle_deadline = now - self._silence + (GRACE if meter.signs.ended else timeouts.between_events)
        while True:
            try:
                data = await self._incoming.read((idle_deadline if idle_deadline < deadline else deadline) - now)
            except TimedOut:
                if deadline <= idle_deadline:
                    raise TimedOut(
                        "the stream had no content before the deadline"
                        if first
                        else f"the stream did not end within {timeouts.total:.3g} s"
                    ) from None
                raise TimedOut(f"the stream sent no event for {timeouts.between_events:.3g} s") from None
            if not data:
                return None
            before, progress = now, meter.progress
            now = self._clock.now()
            passed = meter.push(data) if not meter.is_heavy(data) else await meter.push_heavy(data)
            self._silence = self._silence + now - before if meter.progress == progress else 0.0
            if passed or meter.broken is not None:
                return passed

    def _said(self, passed: bytes) -> bytes:
        """Return the events in the client's wire format."""
        return passed if self._translator is None else self._translator.push(passed)

    async def _said_apart(self, passed: bytes) -> bytes:
        """Do what `_translate` does in a child process, for a large event."""
        if self._translator is None:
            return passed
        try:
            self._translator, output = await offload.run(len(passed), translated, self._translator, passed)
        except WorkTooLarge as e:
            raise Broken(f"an event of the stream is too large to translate: {e.message}") from e
        return output

    def __aiter__(self) -> Passage:
        return self

    async def __anext__(self) -> bytes:
        if self._kept:
            kept, self._kept = b"".join(self._kept), []
            if kept:
                return kept
        while not self._over:
            try:
                passed = await self._more(self._call.deadline) if self.meter.broken is None else None
                is_large = passed is not None and len(passed) >= HUGE
                if output := self._next(passed, await self._said_apart(passed) if passed and is_large else None):
                    return output
            except UpstreamFailed as e:
                if not self.meter.signs.ended:
                    return self._fail(e)
                self._end("complete", "")  # the end event was received: only the connection did not close cleanly
        raise StopAsyncIteration

    def _next(self, passed: bytes | None, output: bytes | None = None) -> bytes:
        """Return the next output; `output` is `passed` in the client's wire format, if already translated."""
        meter = self.meter
        if passed is None and meter.broken is None:
            meter.end()
        if meter.broken is not None and not passed:
            raise meter.broken  # only after the valid events were passed on
        if passed is None:
            output = self._said(meter.missing) if meter.missing else b""
            if self._translator is not None:
                output += self._translator.end()
            self._end("complete", "")
            return output
        output = self._said(passed) if output is None else output
        if meter.signs.failed:  # the provider's own error event is passed on as the last event
            self._end("cut", Broken.code)
        return output

    def _fail(self, error: UpstreamFailed) -> bytes:
        self._end("cut", error.code)
        if self._translator is not None:
            final_event: bytes | None = self._translator.fail(error)
        else:
            final_event = last_words(self._call.dialect, error)
        if not final_event:
            raise error
        return final_event

    def _end(self, outcome: str, code: str) -> None:
        if self._over:
            return
        self._over = True
        self._incoming.close()
        if self._settle is not None:
            self._settle(self, outcome, code)

    async def aclose(self) -> None:
        """Close the stream before its end, because the client disconnected."""
        self._end("complete" if self.meter.signs.ended else "left", "")


def translated(translator: StreamTranslator, data: bytes) -> tuple[StreamTranslator, bytes]:
    """Push `data` in a child process and return the translator's new state with the output."""
    output = translator.push(data)
    return translator, output
