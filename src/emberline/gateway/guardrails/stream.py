"""GuardedStream: a streamed reply whose events pass, byte by byte as they came, when their text is decided. What is
redacted is taken out of the events that had it; what is blocked ends the stream before the first event that has any of
it. Where a text is interrupted by one of another kind (a tool's arguments), its end goes, so that the other does not
wait; if the text goes on, what both halves make is found, and its second half is held back. `hold` keeps everything
until the end: for judges that may block."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from emberline.gateway.call import Stream
from emberline.gateway.errors import Blocked
from emberline.gateway.guardrails.finding import Finding
from emberline.gateway.guardrails.scanner import Scanner, Span
from emberline.gateway.guardrails.texts import Path, Text, event_texts, silence
from emberline.gateway.guardrails.window import Piece, Series, Window
from emberline.gateway.streams.splitter import Splitter, payload_of

LARGEST_HELD = 8 << 20  # bytes that are kept for a judge
TOO_LARGE = Finding("judges", "unchecked", "RESPONSE", "block")
_REPEATS = (".done", ".completed", ".incomplete", ".failed")  # events that say again what was said


class Warden(Protocol):
    """Who decides about one reply."""

    def note(self, finding: Finding) -> None: ...

    async def judge(self, said: str) -> Finding | None:
        """What it is to be blocked for."""
        ...

    def last_words(self, finding: Finding) -> bytes:
        """The reply is over. Raises, where the dialect has none."""
        ...


@dataclass(slots=True)
class Held:
    """An event that has not gone."""

    event: bytes
    name: bytes = b""
    found: Any = None  # decoded
    pieces: list[Piece] = field(default_factory=list)

    @property
    def decided(self) -> bool:
        return all(piece.is_decided for piece in self.pieces)

    def has(self, window: Window, span: Span) -> bool:
        placed = (each for piece in self.pieces for each in piece.placed if each.window is window)
        return any(each.start < span.end and span.start < each.end for each in placed)

    def written(self) -> bytes:
        edited = [piece.edit() for piece in self.pieces]
        if not any(edited):
            return self.event
        silence(self.found)
        head = b"event: %b\n" % self.name if self.name else b""
        return head + b"data: %b\n\n" % msgspec.json.encode(self.found)


class GuardedStream:
    def __init__(
        self, stream: Stream, scanner: Scanner, warden: Warden, *, judged: bool = False, hold: bool = False
    ) -> None:
        """`judged`: what was said is put to a judge at the end."""
        self._stream, self._scanner, self._warden = stream, scanner, warden
        self._judged, self._hold = judged, hold
        self._splitter = Splitter()
        self._events: deque[Held] = deque()
        self._series: dict[Path, Series] = {}
        self._voices: dict[Path, Path] = {}  # voice -> the series that it speaks of just now
        self._stop: tuple[Window, Span] | None = None  # what is blocked
        self._said: list[str] = []
        self._size = 0
        self._over = False
        self._broken: Blocked | None = None  # told by breaking the connection, when all else has gone

    def __aiter__(self) -> GuardedStream:
        return self

    async def __anext__(self) -> bytes:
        while not self._over:
            try:
                chunk = await self._stream.__anext__()
            except StopAsyncIteration:
                if last := await self._last():
                    return last
                break
            for event in self._splitter.push(chunk):
                self._events.append(self._read(event))
                if self._stop is not None:
                    break
            self._size += len(chunk)
            if self._hold and self._size > LARGEST_HELD:
                return await self._refused(TOO_LARGE)
            if passed := await self._passed():
                return passed
        if self._broken is not None:
            raise self._broken
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._over = True
        await self._stream.aclose()

    # -- what comes ----------------------------------------------------------------------------------------------------

    def _read(self, event: bytes) -> Held:
        name, payload = payload_of(event)
        held = Held(event, name)
        if payload[:1] == b"{":
            try:
                held.found = msgspec.json.decode(payload)
            except (msgspec.MsgspecError, UnicodeError):  # what is nested too deep must not pass for that
                held.found = {"text": payload.decode("utf-8", "replace")}  # of a provider's own kind
            texts = list(event_texts(held.found))
            if isinstance(kind := held.found.get("type"), str) and kind.endswith(_REPEATS):
                self._repeated(held, texts)
            else:
                for text in texts:
                    self._heard(held, text)
        return held

    def _repeated(self, held: Held, texts: list[Text]) -> None:
        """Whole texts: they do not wait for what may follow."""
        touched = {text.series: self._series.setdefault(text.series, Series(self._scanner)) for text in texts}
        held.pieces += [touched[text.series].add(text) for text in texts]
        for series in touched.values():
            self._look(series, last=True)

    def _heard(self, held: Held, text: Text) -> None:
        if not text.grows:
            self._add(held, text, Series(self._scanner), last=True)
            return
        series = self._series.setdefault(text.series, Series(self._scanner))
        if self._judged:
            self._said.append(text.text)
        before = self._voices.get(text.voice)
        if before is not None and before != text.series:  # what it said must go: it may never be continued
            self._look(self._series[before], last=True)
        self._voices[text.voice] = text.series
        self._add(held, text, series)

    def _add(self, held: Held, text: Text, series: Series, *, last: bool = False) -> None:
        held.pieces.append(series.add(text))
        self._look(series, last=last)

    def _look(self, series: Series, *, last: bool = False) -> None:
        for window, span in series.look(last=last):
            self._warden.note(self._scanner.finding(span))
            if span.rule.action == "block" and self._stop is None:
                self._stop = window, span

    # -- what goes -----------------------------------------------------------------------------------------------------

    async def _passed(self) -> bytes:
        if self._stop is not None:
            return await self._blocked()
        return b"" if self._hold else b"".join(self._gone())

    def _gone(self) -> Iterable[bytes]:
        while self._events and self._events[0].decided:
            if self._stop is not None and self._events[0].has(*self._stop):
                return
            yield self._events.popleft().written()

    async def _blocked(self) -> bytes:
        assert self._stop is not None
        before = b"" if self._hold else b"".join(self._gone())
        finding = self._scanner.finding(self._stop[1])
        await self.aclose()
        try:
            return before + self._warden.last_words(finding)
        except Blocked as e:
            self._broken = e
            return before

    async def _refused(self, finding: Finding) -> bytes:
        """Nothing of it has gone, or all: there is only the last word."""
        self._warden.note(finding)
        await self.aclose()
        return self._warden.last_words(finding)

    async def _last(self) -> bytes:
        for series in self._series.values():
            self._look(series, last=True)
        if self._stop is not None:
            return await self._blocked()
        if self._judged and (finding := await self._warden.judge("".join(self._said))) is not None:
            return await self._refused(finding)
        self._over = True
        return b"".join(self._gone()) + self._splitter.rest
