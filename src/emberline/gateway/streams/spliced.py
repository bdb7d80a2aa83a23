"""Joins several replies into one stream, each continuing where the one before broke.

All replies are parsed and rendered again in the client's wire format, so that the stream has one start, blocks in order
and one end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

import msgspec

from emberline.api import sse
from emberline.gateway.call import Call, Reply
from emberline.gateway.costs.beside import Beside
from emberline.gateway.dialects import deltas
from emberline.gateway.dialects.asked import asked_of
from emberline.gateway.dialects.events import EventSplitter
from emberline.gateway.dialects.inner import Spoken
from emberline.gateway.dialects.order import Order
from emberline.gateway.dialects.translate import GRAMMARS
from emberline.gateway.errors import Broken, UpstreamFailed
from emberline.gateway.streams.seam import Seam

# Returns the reply that continues after this text and this broken reply, with its repetition filter; None if none can.
GoOn: TypeAlias = Callable[[str, Reply], Awaitable[tuple[Reply, Seam] | None]]

ENDED_HERE = "ended here"  # the broken reply already had its finish reason, so only its end event was missing


class Spliced:
    def __init__(self, call: Call, dialect: Spoken, first: Reply, find_continuation: GoOn) -> None:
        self._call, self._dialect, self._go_on = call, dialect, find_continuation
        self._beside = Beside()  # usage and cost of the replies that broke
        self._writer = GRAMMARS[dialect].writer(asked_of(call.body, dialect, id=call.id))
        self._order = Order(single=True)
        self._made: list[bytes] = []
        self._said: list[str] = []
        self._text_only = True  # tool calls and refusals cannot be continued
        self._finished = self._ended = self._over = False
        self._seam: Seam | None = None
        self._begin(first)
        self.reply = msgspec.structs.replace(first, body=self, endings=[self._beside.add])

    def _begin(self, reply: Reply) -> None:
        assert not isinstance(reply.body, bytes)
        self._leg, self._stream = reply, reply.body
        self._splitter = EventSplitter()
        self._reader = GRAMMARS[self._dialect].reader()

    def __aiter__(self) -> Spliced:
        return self

    async def __anext__(self) -> bytes:
        while not self._over:
            await self._more()
            if self._made:
                output, self._made = b"".join(self._made), []
                if output:
                    return output
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close the stream before its end, because the client disconnected."""
        if not self._over:
            await self._end()

    # -- one reply -----------------------------------------------------------------------------------------------------

    async def _more(self) -> None:
        try:
            chunk = await self._stream.__anext__()
            for event in self._splitter.push(chunk):
                self._take(self._reader.read(event))
        except StopAsyncIteration:
            await self._closed()
        except UpstreamFailed as e:
            await self._broken(e)

    async def _closed(self) -> None:
        try:
            self._take(self._reader.end())
            if not self._ended:
                raise Broken("the stream ended without its end event")
        except UpstreamFailed as e:
            await self._broken(e)
        else:
            await self._end()

    def _take(self, deltas_read: Iterable[deltas.Delta]) -> None:
        for source_delta in deltas_read:
            if self._ended:
                return
            for delta in (source_delta,) if self._seam is None else self._fit(source_delta, self._seam):
                self._order.check(delta)
                self._made.append(self._writer.push(delta))
                self._note(delta)

    def _note(self, delta: deltas.Delta) -> None:
        match delta:
            case deltas.TextPiece():
                self._said.append(delta.text)
            case deltas.ToolOpened() | deltas.ToolPiece() | deltas.RefusalPiece():
                self._text_only = False
            case deltas.Finished():
                self._finished = True
            case deltas.Ended():
                self._ended = True

    def _fit(self, delta: deltas.Delta, repetition_filter: Seam) -> Iterable[deltas.Delta]:
        """Yield what a continuation adds: no second start, no reasoning, no repeated text, and total usage.

        Citations are dropped, because their offsets do not count from the start of the whole text.
        """
        match delta:
            case deltas.Opened() | deltas.ThinkingPiece() | deltas.Cited():
                return
            case deltas.Sealed() if delta.family != "gemini":  # Gemini's signatures belong to tool calls
                return
            case deltas.Counted():
                usage = self._beside.usage
                yield delta if usage is None else deltas.Counted(delta.usage.plus(usage))
            case deltas.TextPiece():
                if text := repetition_filter.push(delta.text):
                    yield deltas.TextPiece(text)
            case _:
                if text := repetition_filter.end():
                    yield deltas.TextPiece(text)
                yield delta

    # -- end -----------------------------------------------------------------------------------------------------------

    async def _broken(self, error: UpstreamFailed) -> None:
        if self._ended:
            await self._end()  # only the connection did not close cleanly
            return
        await self._leg.close()
        if self._finished:
            self._take([deltas.Ended()])
            await self._end("complete", continued=ENDED_HERE)
        elif self._text_only and (continuation := await self._go_on("".join(self._said), self._leg)) is not None:
            self._count(self._leg)
            reply, self._seam = continuation
            self._note_leg(f"{reply.provider}/{reply.model}")
            self._begin(reply)
        else:
            self._made.append(
                self._writer.fail(error).removesuffix(sse.DONE)
            )  # [DONE] would make the stream look complete
            await self._end("cut", self._leg.error or error.code)

    def _count(self, reply: Reply) -> None:
        custom = self._call.options.custom_cost
        has_fixed_price = custom is not None and custom.micros is not None  # a fixed price covers the whole request
        self._beside.count(reply.usage, 0 if has_fixed_price else reply.micros, estimated=reply.estimated)

    def _note_leg(self, provider: str) -> None:
        self.reply.continued = ", ".join(filter(None, (self.reply.continued, provider)))

    async def _end(self, outcome: str = "", error: str = "", continued: str = "") -> None:
        """Close the stream; `outcome` and `error` override those of the last reply."""
        self._over = True
        last, reply = self._leg, self.reply
        await last.close()
        reply.ended, reply.error = (outcome, error) if outcome else (last.ended, last.error)
        reply.usage, reply.micros, reply.estimated = last.usage, last.micros, last.estimated
        if continued:
            self._note_leg(continued)
