"""Joins several replies into one stream: each reply continues where the previous reply broke.

All replies are parsed and rendered again in the client's wire format, so that the client sees one stream with one start
and one end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

import msgspec

from emberline.gateway.core.errors import UpstreamBroken, UpstreamFailed
from emberline.gateway.core.request import GatewayReply, GatewayRequest
from emberline.gateway.costs.extra_cost import ExtraCost
from emberline.gateway.dialects.delta_order import DeltaOrderChecker
from emberline.gateway.dialects.translate import CODECS, write_delta
from emberline.gateway.streams.repetition_filter import RepetitionFilter
from emberline.wire import deltas, sse
from emberline.wire.deltas import ChatDialect
from emberline.wire.event_splitter import EventSplitter, read_event_data
from emberline.wire.reply_context import ReplyContext

# Returns the reply that continues after this text and this broken reply, with its repetition filter; None if none can.
FindContinuation: TypeAlias = Callable[[str, GatewayReply], Awaitable[tuple[GatewayReply, RepetitionFilter] | None]]

ENDED_BY_GATEWAY = "ended here"  # the broken reply already had its finish reason, so only its end event was missing


class ContinuedStream:
    """The joined stream that the client receives. It is the body of `reply`, the gateway's reply."""

    def __init__(
        self,
        call: GatewayRequest,
        dialect: ChatDialect,
        context: ReplyContext,
        first_reply: GatewayReply,
        find_continuation: FindContinuation,
    ) -> None:
        self._call, self._dialect, self._find_continuation = call, dialect, find_continuation
        self._broken_costs = ExtraCost()  # usage and cost of the replies that broke
        self._writer = CODECS[dialect].make_writer(context)
        self._order_checker = DeltaOrderChecker(single_choice=True)
        self._output: list[bytes] = []
        self._sent_texts: list[str] = []
        self._text_only = True  # tool calls and refusals cannot be continued
        self._has_finish_reason = self._has_ended = self._is_closed = False
        self._repetition_filter: RepetitionFilter | None = None
        self._start_reply(first_reply)
        self.reply = msgspec.structs.replace(first_reply, body=self, close_callbacks=[self._broken_costs.add_to_reply])

    def _start_reply(self, reply: GatewayReply) -> None:
        assert not isinstance(reply.body, bytes)
        self._current_reply, self._stream = reply, reply.body
        self._splitter = EventSplitter(UpstreamBroken)
        self._reader = CODECS[self._dialect].make_reader()

    def __aiter__(self) -> ContinuedStream:
        return self

    async def __anext__(self) -> bytes:
        while not self._is_closed:
            await self._read_chunk()
            if self._output:
                output, self._output = b"".join(self._output), []
                if output:
                    return output
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close the stream before its end, because the client disconnected."""
        if not self._is_closed:
            await self._finish_stream()

    # -- one reply -----------------------------------------------------------------------------------------------------

    async def _read_chunk(self) -> None:
        try:
            chunk = await self._stream.__anext__()
            for event in self._splitter.push(chunk):
                if payload := read_event_data(event):
                    self._write_deltas(self._reader.read(payload))
        except StopAsyncIteration:
            await self._handle_reply_end()
        except UpstreamFailed as e:
            await self._handle_failure(e)

    async def _handle_reply_end(self) -> None:
        try:
            self._write_deltas(self._reader.end())
            if not self._has_ended:
                raise UpstreamBroken("the stream ended without its end event")
        except UpstreamFailed as e:
            await self._handle_failure(e)
        else:
            await self._finish_stream()

    def _write_deltas(self, deltas_read: Iterable[deltas.ProviderDelta]) -> None:
        for source_delta in deltas_read:
            if self._has_ended:
                return
            for delta in (
                (source_delta,)
                if self._repetition_filter is None
                else self._filter_delta(source_delta, self._repetition_filter)
            ):
                self._order_checker.check(delta)
                self._output.append(write_delta(self._writer, delta))
                self._track_delta(delta)

    def _track_delta(self, delta: deltas.ProviderDelta) -> None:
        match delta:
            case deltas.TextDelta():
                self._sent_texts.append(delta.text)
            case deltas.ToolCallStart() | deltas.ToolCallArguments() | deltas.RefusalDelta():
                self._text_only = False
            case deltas.Finish():
                self._has_finish_reason = True
            case deltas.StreamEnd():
                self._has_ended = True

    def _filter_delta(
        self, delta: deltas.ProviderDelta, repetition_filter: RepetitionFilter
    ) -> Iterable[deltas.ProviderDelta]:
        """Yield the deltas of a continuation that the client should see.

        The start delta, reasoning and repeated text are dropped. Citations are also dropped: their offsets do not count
        from the start of the whole text. The usage of the broken replies is added to the continuation's usage.
        """
        match delta:
            case deltas.StreamStart() | deltas.ReasoningDelta() | deltas.CitationDelta():
                return
            case deltas.SignatureDelta() if delta.origin != "gemini":  # Gemini's signatures belong to tool calls
                return
            case deltas.UsageUpdate():
                usage = self._broken_costs.usage
                yield delta if usage is None else deltas.UsageUpdate(delta.usage.plus(usage))
            case deltas.TextDelta():
                if text := repetition_filter.push(delta.text):
                    yield deltas.TextDelta(text)
            case _:
                if text := repetition_filter.end():
                    yield deltas.TextDelta(text)
                yield delta

    # -- end -----------------------------------------------------------------------------------------------------------

    async def _handle_failure(self, error: UpstreamFailed) -> None:
        if self._has_ended:
            await self._finish_stream()  # only the connection did not close cleanly
            return
        await self._current_reply.close()
        if self._has_finish_reason:
            self._write_deltas([deltas.StreamEnd()])
            await self._finish_stream("complete", continued_by=ENDED_BY_GATEWAY)
        elif (
            self._text_only
            and (continuation := await self._find_continuation("".join(self._sent_texts), self._current_reply))
            is not None
        ):
            self._add_broken_cost(self._current_reply)
            reply, self._repetition_filter = continuation
            self._record_continuation(f"{reply.provider}/{reply.model}")
            self._start_reply(reply)
        else:
            # [DONE] would make the stream look complete.
            self._output.append(self._writer.write_error(error).removesuffix(sse.DONE_EVENT))
            await self._finish_stream("cut", self._current_reply.error or error.code)

    def _add_broken_cost(self, reply: GatewayReply) -> None:
        custom = self._call.options.custom_cost
        has_fixed_price = custom is not None and custom.micros is not None  # a fixed price covers the whole request
        self._broken_costs.add_usage(reply.usage, 0 if has_fixed_price else reply.micros, estimated=reply.estimated)

    def _record_continuation(self, provider: str) -> None:
        self.reply.continued_by = ", ".join(filter(None, (self.reply.continued_by, provider)))

    async def _finish_stream(self, outcome: str = "", error: str = "", continued_by: str = "") -> None:
        """Close the stream. `outcome` and `error`, if given, replace those of the last reply.

        `continued_by`, if given, is added to the reply's field `continued_by`, which is logged.
        """
        self._is_closed = True
        last, reply = self._current_reply, self.reply
        await last.close()
        reply.ended, reply.error = (outcome, error) if outcome else (last.ended, last.error)
        reply.error_message = last.error_message if reply.error else ""
        reply.usage, reply.micros, reply.estimated = last.usage, last.micros, last.estimated
        if continued_by:
            self._record_continuation(continued_by)
