"""GuardedStream: a streamed reply whose events pass unchanged as soon as their text is decided.

Redacted text is cut from the events that contain it. A blocked match ends the stream before the first event that
contains any of it. If a text is interrupted by another one (a tool's arguments), its undecided end is released so that
the other does not wait; if it then continues, a match across both halves is found and its second half held back.
`hold_all` keeps everything until the end, for judges that may block."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from emberline.core.errors import WorkTooLarge
from emberline.core.offload import LARGE, offload
from emberline.gateway.call import Stream
from emberline.gateway.errors import Blocked
from emberline.gateway.guardrails.finding import Finding
from emberline.gateway.guardrails.scanner import Scanner, Span
from emberline.gateway.guardrails.texts import (
    Path,
    Text,
    event_texts,
    read_event,
    rewritten_event,
    texts_of_event,
    written_event,
)
from emberline.gateway.guardrails.window import Piece, Series, Window
from emberline.gateway.streams.splitter import Splitter, payload_of

LARGEST_HELD = 8 << 20  # held back for a judge
MAX_TEXTS = 10_000
TOO_LARGE = Finding("judges", "unchecked", "RESPONSE", "block")
_REPEATS = (".done", ".completed", ".incomplete", ".failed")  # of events that repeat the whole text


class Warden(Protocol):
    """Records the findings of one reply, and decides about it."""

    def note(self, finding: Finding) -> None: ...

    async def judge(self, said: str) -> Finding | None:
        """Return the finding for which the reply is to be blocked, or None."""
        ...

    def last_words(self, finding: Finding) -> bytes:
        """End the reply and return its error event. Raises Blocked if the dialect has no error events."""
        ...


@dataclass(slots=True)
class Held:
    """An event that has not been released."""

    event: bytes
    name: bytes = b""
    found: Any = None  # of a large event, only its texts
    is_large: bool = False
    pieces: list[Piece] = field(default_factory=list)

    @property
    def decided(self) -> bool:
        return all(piece.is_decided for piece in self.pieces)

    def has(self, window: Window, span: Span) -> bool:
        placed = (each for piece in self.pieces for each in piece.placed if each.window is window)
        return any(each.start < span.end and span.start < each.end for each in placed)

    async def written(self) -> bytes:
        """Return the event with redactions applied."""
        edited = [piece.at.key for piece in self.pieces if piece.edit()]
        if not edited:
            return self.event
        if not self.is_large:
            return written_event(self.name, self.found)
        new_texts = {number: self.found[number] for number in edited}
        return await offload.run(len(self.event), rewritten_event, self.name, payload_of(self.event)[1], new_texts)


class GuardedStream:
    def __init__(
        self, stream: Stream, scanner: Scanner, warden: Warden, *, judged: bool = False, hold: bool = False
    ) -> None:
        """`is_judged`: judges read the whole text at the end. `hold_all`: nothing is released before."""
        self._stream, self._scanner, self._warden = stream, scanner, warden
        self._judged, self._hold = judged, hold
        self._splitter = Splitter()
        self._events: deque[Held] = deque()
        self._series: dict[Path, Series] = {}
        self._voices: dict[Path, Path] = {}  # choice -> its series that is being streamed
        self._stop: tuple[Window, Span] | None = None  # the match that blocks the reply
        self._said: list[str] = []
        self._size = 0
        self._over = False
        self._broken: Blocked | None = None  # raised after the last event, where the dialect has no error events

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
                self._events.append(await self._read(event))
                if self._stop is not None:
                    break
            self._size += len(chunk)
            if self._hold and self._size > LARGEST_HELD:
                return await self._refused(TOO_LARGE)
            if released := await self._passed():
                return released
        if self._broken is not None:
            raise self._broken
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._over = True
        await self._stream.aclose()

    # -- reading events ------------------------------------------------------------------------------------------------

    async def _read(self, event: bytes) -> Held:
        name, payload = payload_of(event)
        held = Held(event, name)
        if payload[:1] == b"{":
            if len(payload) < LARGE:
                held.found = read_event(payload)
                texts = list(event_texts(held.found))
            else:
                texts = await self._texts(held, payload)
            kind = texts[0].path[0][0] if texts else None
            if isinstance(kind, str) and kind.endswith(_REPEATS):
                await self._repeated(held, texts)
            else:
                for text in texts:
                    await self._heard(held, text)
        return held

    async def _texts(self, held: Held, payload: bytes) -> list[Text]:
        """Return the texts of a large event, found in another process.

        An event with too many texts counts as one text: its JSON.
        """
        try:
            listed = await offload.run(len(payload), texts_of_event, payload, MAX_TEXTS)
        except WorkTooLarge:
            whole = payload.decode("utf-8", "replace")
            held.found = {"text": whole}
            return [Text(held.found, "text", whole, ((None,), "text"))]
        held.is_large, held.found = True, [text for _, text in listed]
        return [Text(held.found, number, text, path) for number, (path, text) in enumerate(listed)]

    async def _repeated(self, held: Held, texts: list[Text]) -> None:
        """Scan an event with whole texts, which need not wait for a continuation."""
        touched = {text.series: self._series.setdefault(text.series, Series(self._scanner)) for text in texts}
        held.pieces += [touched[text.series].add(text) for text in texts]
        for series in touched.values():
            await self._looked(series, last=True)

    async def _heard(self, held: Held, text: Text) -> None:
        if not text.grows:
            await self._add(held, text, Series(self._scanner), last=True)
            return
        series = self._series.setdefault(text.series, Series(self._scanner))
        if self._judged:
            self._said.append(text.text)
        previous = self._voices.get(text.voice)
        if previous is not None and previous != text.series:  # release its end: it may never continue
            await self._looked(self._series[previous], last=True)
        self._voices[text.voice] = text.series
        await self._add(held, text, series)

    async def _add(self, held: Held, text: Text, series: Series, *, last: bool = False) -> None:
        held.pieces.append(series.add(text))
        await self._looked(series, last=last)

    async def _looked(self, series: Series, *, last: bool = False) -> None:
        """Scan a series; a long text is scanned in pieces, between which other requests run."""
        self._look(series, last=last)
        while series.is_behind:
            await asyncio.sleep(0)
            self._look(series, last=last)

    def _look(self, series: Series, *, last: bool = False) -> None:
        for window, span in series.look(last=last):
            self._warden.note(self._scanner.finding(span))
            if span.rule.action == "block" and self._stop is None:
                self._stop = window, span

    # -- releasing events ----------------------------------------------------------------------------------------------

    async def _passed(self) -> bytes:
        if self._stop is not None:
            return await self._blocked()
        return b"" if self._hold else await self._gone()

    async def _gone(self) -> bytes:
        released: list[bytes] = []
        while self._events and self._events[0].decided:
            if self._stop is not None and self._events[0].has(*self._stop):
                break
            released.append(await self._events.popleft().written())
        return released[0] if len(released) == 1 else b"".join(released)

    async def _blocked(self) -> bytes:
        assert self._stop is not None
        released = b"" if self._hold else await self._gone()
        finding = self._scanner.finding(self._stop[1])
        await self.aclose()
        try:
            return released + self._warden.last_words(finding)
        except Blocked as e:
            self._broken = e
            return released

    async def _refused(self, finding: Finding) -> bytes:
        """End the stream with an error; either nothing or everything has been released."""
        self._warden.note(finding)
        await self.aclose()
        return self._warden.last_words(finding)

    async def _last(self) -> bytes:
        for series in self._series.values():
            await self._looked(series, last=True)
        if self._stop is not None:
            return await self._blocked()
        if self._judged and (finding := await self._warden.judge("".join(self._said))) is not None:
            return await self._refused(finding)
        self._over = True
        return await self._gone() + self._splitter.rest
