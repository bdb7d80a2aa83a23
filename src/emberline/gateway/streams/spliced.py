"""Spliced: one stream out of several replies, each going on where the last broke off. It is read and written anew in
the client's dialect, so that it has one beginning, blocks in order and one end, whoever tells its parts."""

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

# Who goes on after a text and the leg that broke, and the seam between; None: nobody.
GoOn: TypeAlias = Callable[[str, Reply], Awaitable[tuple[Reply, Seam] | None]]

ENDED_HERE = "ended here"  # it had given its reason to stop, and nothing was left to ask for


class Spliced:
    def __init__(self, call: Call, dialect: Spoken, first: Reply, go_on: GoOn) -> None:
        self._call, self._dialect, self._go_on = call, dialect, go_on
        self._beside = Beside()  # the legs that broke
        self._writer = GRAMMARS[dialect].writer(asked_of(call.body, dialect, id=call.id))
        self._order = Order(single=True)
        self._made: list[bytes] = []
        self._said: list[str] = []
        self._text_only = True  # so far: of a call, or a refusal, there is no going on
        self._finished = self._ended = self._over = False
        self._seam: Seam | None = None
        self._begin(first)
        self.reply = msgspec.structs.replace(first, body=self, endings=[self._beside.add])

    def _begin(self, leg: Reply) -> None:
        assert not isinstance(leg.body, bytes)
        self._leg, self._stream = leg, leg.body
        self._splitter = EventSplitter()
        self._reader = GRAMMARS[self._dialect].reader()

    def __aiter__(self) -> Spliced:
        return self

    async def __anext__(self) -> bytes:
        while not self._over:
            await self._more()
            if self._made:
                made, self._made = b"".join(self._made), []
                if made:
                    return made
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Before the end: the client has left."""
        if not self._over:
            await self._end()

    # -- a leg ---------------------------------------------------------------------------------------------------------

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
                raise Broken("the stream ended without its ending")
        except UpstreamFailed as e:
            await self._broken(e)
        else:
            await self._end()

    def _take(self, pieces: Iterable[deltas.Delta]) -> None:
        for piece in pieces:
            if self._ended:
                return
            for delta in (piece,) if self._seam is None else self._fit(piece, self._seam):
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

    def _fit(self, piece: deltas.Delta, seam: Seam) -> Iterable[deltas.Delta]:
        """Of a later leg: it does not begin again, nor think aloud once more, and repeats nothing. What it cites is
        left out: its places are not those of the whole."""
        match piece:
            case deltas.Opened() | deltas.ThinkingPiece() | deltas.Cited():
                return
            case deltas.Sealed() if piece.family != "gemini":  # whose seals belong to calls
                return
            case deltas.Counted():
                usage = self._beside.usage
                yield piece if usage is None else deltas.Counted(piece.usage.plus(usage))
            case deltas.TextPiece():
                if text := seam.push(piece.text):
                    yield deltas.TextPiece(text)
            case _:
                if text := seam.end():
                    yield deltas.TextPiece(text)
                yield piece

    # -- its end -------------------------------------------------------------------------------------------------------

    async def _broken(self, error: UpstreamFailed) -> None:
        if self._ended:
            await self._end()  # it only hung up badly
            return
        await self._leg.close()
        if self._finished:
            self._take([deltas.Ended()])
            await self._end("complete", continued=ENDED_HERE)
        elif self._text_only and (onward := await self._go_on("".join(self._said), self._leg)) is not None:
            self._count(self._leg)
            leg, self._seam = onward
            self._note_leg(f"{leg.provider}/{leg.model}")
            self._begin(leg)
        else:
            self._made.append(self._writer.fail(error).removesuffix(sse.DONE))  # which would make it look whole
            await self._end("cut", self._leg.error or error.code)

    def _count(self, leg: Reply) -> None:
        custom = self._call.options.custom_cost
        once = custom is not None and custom.micros is not None  # the price of the whole request
        self._beside.count(leg.usage, 0 if once else leg.micros, estimated=leg.estimated)

    def _note_leg(self, who: str) -> None:
        self.reply.continued = ", ".join(filter(None, (self.reply.continued, who)))

    async def _end(self, how: str = "", error: str = "", continued: str = "") -> None:
        """`how`: otherwise than the last leg did."""
        self._over = True
        leg, reply = self._leg, self.reply
        await leg.close()
        reply.ended, reply.error = (how, error) if how else (leg.ended, leg.error)
        reply.usage, reply.micros, reply.estimated = leg.usage, leg.micros, leg.estimated
        if continued:
            self._note_leg(continued)
