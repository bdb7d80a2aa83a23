"""GuardedStream: a streamed reply that is searched for sensitive data while it passes.

An event is passed on unchanged as soon as its text is decided: no later text can make it part of a match. Redacted text
is cut out of the events that contain it. A match of a blocking rule ends the stream before the first event that
contains a part of the match.

A text can be interrupted by a different text, such as the arguments of a tool call. The undecided end of the first text
is then passed on, so that the second text need not wait. If the first text continues later, a match that spans both
halves is still found, and its second half is held back.

With `hold_all` no event is passed on before the end of the stream, so that judges can block the whole reply.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from emberline.core.errors import WorkTooLarge
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.gateway.core.errors import BlockedByGuardrail, UpstreamBroken
from emberline.gateway.core.guardrail_finding import GuardrailFinding
from emberline.gateway.core.request import ReplyStream
from emberline.gateway.guardrails.scanner import PatternMatch, PatternScanner
from emberline.gateway.guardrails.text_window import TextSeries, TextWindow, WindowPiece
from emberline.gateway.guardrails.texts import (
    JsonText,
    TextPath,
    decode_event,
    encode_event,
    iter_event_texts,
    list_event_texts,
    rewrite_event,
)
from emberline.wire.event_splitter import EventSplitter, parse_event

MAX_HELD_BYTES = 8 << 20  # held back for a judge
MAX_EVENT_TEXTS = 10_000
TOO_LARGE_FINDING = GuardrailFinding("judges", "unchecked", "RESPONSE", "block")
_SUMMARY_EVENT_SUFFIXES = (".done", ".completed", ".incomplete", ".failed")  # of events that repeat the whole text


class ReplyGuard(Protocol):
    """Records the findings of one reply, and decides whether the reply is blocked."""

    def record_finding(self, finding: GuardrailFinding) -> None: ...

    async def judge_reply(self, text: str) -> GuardrailFinding | None:
        """Ask the judges about the reply's text. Return the finding that blocks the reply, or None."""
        ...

    def end_with_error_event(self, finding: GuardrailFinding) -> bytes:
        """End the reply and return an error event for the client.

        Raise BlockedByGuardrail if the client's wire format has no error events.
        """
        ...


@dataclass(slots=True)
class HeldEvent:
    """An event of the stream that has not been passed on to the client."""

    event: bytes
    name: bytes = b""
    decoded: Any = None  # of a large event, only its texts
    is_large: bool = False
    pieces: list[WindowPiece] = field(default_factory=list)

    @property
    def can_be_released(self) -> bool:
        return all(piece.can_be_released for piece in self.pieces)

    def overlaps(self, window: TextWindow, match: PatternMatch) -> bool:
        placed = (each for piece in self.pieces for each in piece.positions if each.window is window)
        return any(each.start < match.end and match.start < each.end for each in placed)

    async def encode(self) -> bytes:
        """Return the event's bytes with the redactions applied."""
        edited = [piece.source.key for piece in self.pieces if piece.apply_redactions()]
        if not edited:
            return self.event
        if not self.is_large:
            return encode_event(self.name, self.decoded)
        new_texts = {number: self.decoded[number] for number in edited}
        return await offload.run(len(self.event), rewrite_event, self.name, parse_event(self.event)[1], new_texts)


class GuardedStream:
    def __init__(
        self,
        stream: ReplyStream,
        scanner: PatternScanner,
        guard: ReplyGuard,
        *,
        is_judged: bool = False,
        hold_all: bool = False,
    ) -> None:
        """Guard a stream with the scanner's rules.

        `is_judged`: judges read the whole text at the end of the stream. `hold_all`: no event is passed on before the
        end of the stream.
        """
        self._stream, self._scanner, self._guard = stream, scanner, guard
        self._is_judged, self._hold_all = is_judged, hold_all
        self._splitter = EventSplitter(UpstreamBroken)
        self._events: deque[HeldEvent] = deque()
        self._series: dict[TextPath, TextSeries] = {}
        self._current_series: dict[TextPath, TextPath] = {}  # choice -> its series that is being streamed
        self._blocked_match: tuple[TextWindow, PatternMatch] | None = None  # the match that blocks the reply
        self._judged_texts: list[str] = []
        self._bytes_read = 0
        self._is_closed = False
        self._pending_error: BlockedByGuardrail | None = (
            None  # raised after the last event, where the dialect has no error events
        )

    def __aiter__(self) -> GuardedStream:
        return self

    async def __anext__(self) -> bytes:
        while not self._is_closed:
            try:
                chunk = await self._stream.__anext__()
            except StopAsyncIteration:
                if last := await self._finish_stream():
                    return last
                break
            for event in self._splitter.push(chunk):
                self._events.append(await self._read_event(event))
                if self._blocked_match is not None:
                    break
            self._bytes_read += len(chunk)
            if self._hold_all and self._bytes_read > MAX_HELD_BYTES:
                return await self._end_with_finding(TOO_LARGE_FINDING)
            if released := await self._release_or_block():
                return released
        if self._pending_error is not None:
            raise self._pending_error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._is_closed = True
        await self._stream.aclose()

    # -- reading events ------------------------------------------------------------------------------------------------

    async def _read_event(self, event: bytes) -> HeldEvent:
        name, payload = parse_event(event)
        held = HeldEvent(event, name)
        if payload[:1] == b"{":
            if len(payload) < LARGE_INPUT_BYTES:
                held.decoded = decode_event(payload)
                texts = list(iter_event_texts(held.decoded))
            else:
                texts = await self._list_large_event_texts(held, payload)
            kind = texts[0].path[0][0] if texts else None
            if isinstance(kind, str) and kind.endswith(_SUMMARY_EVENT_SUFFIXES):
                await self._scan_summary_event(held, texts)
            else:
                for text in texts:
                    await self._scan_text(held, text)
        return held

    async def _list_large_event_texts(self, held_event: HeldEvent, payload: bytes) -> list[JsonText]:
        """Return the texts of a large event, which a child process decodes.

        If the event has too many texts, its whole JSON counts as one text.
        """
        try:
            listed = await offload.run(len(payload), list_event_texts, payload, MAX_EVENT_TEXTS)
        except WorkTooLarge:
            whole = payload.decode("utf-8", "replace")
            held_event.decoded = {"text": whole}
            return [JsonText(held_event.decoded, "text", whole, ((None,), "text"))]
        held_event.is_large, held_event.decoded = True, [text for _, text in listed]
        return [JsonText(held_event.decoded, number, text, path) for number, (path, text) in enumerate(listed)]

    async def _scan_summary_event(self, held_event: HeldEvent, texts: list[JsonText]) -> None:
        """Scan an event that repeats complete texts, such as the last event of a response.

        No text follows these texts, so their matches are final.
        """
        touched = {
            text.series_key: self._series.setdefault(text.series_key, TextSeries(self._scanner)) for text in texts
        }
        held_event.pieces += [touched[text.series_key].add_text(text) for text in texts]
        for series in touched.values():
            await self._scan_series(series, is_last=True)

    async def _scan_text(self, held_event: HeldEvent, text: JsonText) -> None:
        if not text.is_streamed:
            await self._add_and_scan(held_event, text, TextSeries(self._scanner), is_last=True)
            return
        series = self._series.setdefault(text.series_key, TextSeries(self._scanner))
        if self._is_judged:
            self._judged_texts.append(text.text)
        previous = self._current_series.get(text.choice_path)
        if previous is not None and previous != text.series_key:  # release its end: it may never continue
            await self._scan_series(self._series[previous], is_last=True)
        self._current_series[text.choice_path] = text.series_key
        await self._add_and_scan(held_event, text, series)

    async def _add_and_scan(
        self, held_event: HeldEvent, text: JsonText, series: TextSeries, *, is_last: bool = False
    ) -> None:
        held_event.pieces.append(series.add_text(text))
        await self._scan_series(series, is_last=is_last)

    async def _scan_series(self, series: TextSeries, *, is_last: bool = False) -> None:
        """Scan the new text of a series (texts that clients show as one text).

        A long text is scanned in pieces, and the event loop serves other requests between two pieces.
        """
        self._scan_next_piece(series, is_last=is_last)
        while series.has_unscanned_text:
            await asyncio.sleep(0)
            self._scan_next_piece(series, is_last=is_last)

    def _scan_next_piece(self, series: TextSeries, *, is_last: bool = False) -> None:
        for window, span in series.scan(is_last=is_last):
            self._guard.record_finding(self._scanner.make_finding(span))
            if span.rule.action == "block" and self._blocked_match is None:
                self._blocked_match = window, span

    # -- releasing events ----------------------------------------------------------------------------------------------

    async def _release_or_block(self) -> bytes:
        if self._blocked_match is not None:
            return await self._end_blocked_stream()
        return b"" if self._hold_all else await self._release_events()

    async def _release_events(self) -> bytes:
        released: list[bytes] = []
        while self._events and self._events[0].can_be_released:
            if self._blocked_match is not None and self._events[0].overlaps(*self._blocked_match):
                break
            released.append(await self._events.popleft().encode())
        return released[0] if len(released) == 1 else b"".join(released)

    async def _end_blocked_stream(self) -> bytes:
        assert self._blocked_match is not None
        released = b"" if self._hold_all else await self._release_events()
        finding = self._scanner.make_finding(self._blocked_match[1])
        await self.aclose()
        try:
            return released + self._guard.end_with_error_event(finding)
        except BlockedByGuardrail as e:
            self._pending_error = e
            return released

    async def _end_with_finding(self, finding: GuardrailFinding) -> bytes:
        """End the stream with an error event for the finding.

        Call this method only while no event was passed on, or after all events were passed on.
        """
        self._guard.record_finding(finding)
        await self.aclose()
        return self._guard.end_with_error_event(finding)

    async def _finish_stream(self) -> bytes:
        for series in self._series.values():
            await self._scan_series(series, is_last=True)
        if self._blocked_match is not None:
            return await self._end_blocked_stream()
        if self._is_judged and (finding := await self._guard.judge_reply("".join(self._judged_texts))) is not None:
            return await self._end_with_finding(finding)
        self._is_closed = True
        return await self._release_events() + self._splitter.partial_event
