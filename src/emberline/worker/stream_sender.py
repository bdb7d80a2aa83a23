"""StreamSender: sends a reply as a stream of server-sent events, with one write for each group of deltas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from emberline.cluster.resumable_streams import ResumableStream
from emberline.core.errors import EmberlineError, EngineFailed, EngineUnavailable, Overloaded, ShuttingDown
from emberline.server.exchange import EVENT_STREAM_TYPE, Exchange
from emberline.wire.deltas import ReplyWriter, StreamEnd, StreamStart
from emberline.worker.generation import DeltaGroup
from emberline.worker.request_context import RequestContext
from emberline.worker.server_timing import build_server_timing_header
from emberline.worker.stored_responses import ResponseSaver

log = logging.getLogger("emberline.server")

LAST_EVENT_TIMEOUT_S = 2.0
# Errors that the request did not cause: a tracked stream breaks off, and the router continues it at another worker.
RETRY_ELSEWHERE_ERRORS = (EngineFailed, EngineUnavailable, Overloaded)


class StreamSender:
    def __init__(
        self,
        exchange: Exchange,
        writer: ReplyWriter,
        saver: ResponseSaver | None,
        context: RequestContext,
        media_type: str = EVENT_STREAM_TYPE,
    ) -> None:
        self._exchange = exchange
        self._writer = writer
        self._saver = saver
        self._media_type = media_type
        self._is_tracked = context.is_tracked
        self._replayed_events = b""  # of the group that was replayed last
        self.resumable: ResumableStream | None = None  # None: events have no ids
        self.has_sent_error = False

    async def send_all(self, groups: AsyncGenerator[DeltaGroup, None], headers: dict[str, str]) -> None:
        """Send the reply.

        The status is sent with the first group. So an error before the first group gets an error status. Replayed
        groups, which the client already has, are passed to the writer to restore its state, but are not sent.
        """
        exchange, writer = self._exchange, self._writer
        async with aclosing(groups):
            try:
                unsent = [writer.write(StreamStart())]
                async for group in groups:
                    unsent += [writer.write(delta) for delta in group.deltas]
                    if group.output is None and not group.is_replayed:
                        continue  # the final usage is sent together with the end of the stream
                    if group.is_replayed:
                        self._replayed_events = b"".join(unsent)
                    else:
                        if exchange.status is None:
                            await exchange.start_event_stream(
                                headers | (build_server_timing_header(group.output.timing) if group.output else {}),
                                self._media_type,
                            )
                        await exchange.send(self._encode_group(group, unsent))
                    unsent = []
                unsent.append(writer.write(StreamEnd()))
                if self._saver is not None:
                    await self._saver.save(writer.body())  # before the client knows that the response has ended
            except asyncio.CancelledError:
                # A tracked stream continues at another worker.
                if exchange.status is not None and not exchange.client_disconnected and not self._is_tracked:
                    await self._end_stream_at_shutdown()
                raise
            except Exception as e:
                if exchange.status is None or (self._is_tracked and isinstance(e, RETRY_ELSEWHERE_ERRORS)):
                    raise
                if not isinstance(e, EmberlineError):
                    log.exception("Stream failed: path=%s", exchange.path)
                exchange.log_fields["error"] = e.code if isinstance(e, EmberlineError) else EmberlineError.code
                self.has_sent_error, unsent = True, [writer.write_error(e)]
        if exchange.status is None:
            await exchange.start_event_stream(headers, self._media_type)
        await exchange.send(self._encode_group(DeltaGroup([]), unsent, is_last=True), last=True)

    def _encode_group(self, group: DeltaGroup, events: list[bytes], *, is_last: bool = False) -> bytes:
        """Return the bytes to send for a group: its events, and before them the comments for a router."""
        if (stream := self.resumable) is not None and not self.has_sent_error:
            number, token_group = stream.group_count, None if is_last else group.token_group
            events = [stream.write_group(b"".join(events), token_group, self._replayed_events)]
            if group.cached_tokens is not None:
                stream.cached_tokens.append((number, group.cached_tokens))
            if group.drafts is not None:
                stream.drafts.append((number, group.drafts))
        return b"".join([*_build_router_comments(group, events), *events] if self._is_tracked else events)

    async def _end_stream_at_shutdown(self) -> None:
        """Send the API protocol's error event as the end of a stream, because the server stops."""
        exchange, error = self._exchange, ShuttingDown()
        exchange.log_fields["error"], exchange.logged_status = error.code, error.status
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):  # the client may have stopped reading
                await exchange.send(self._writer.write_error(error), last=True)


def _build_router_comments(group: DeltaGroup, events: list[bytes]) -> list[bytes]:
    line = group.token_group.to_comment(sum(map(len, events)))
    counts = [b": cached %d\n\n" % group.cached_tokens] if group.cached_tokens is not None else []
    if group.drafts is not None:
        counts.append(b": drafts %d %d\n\n" % group.drafts)
    return [*counts, b": chain %s\n\n" % group.chain.encode(), line] if group.chain else [*counts, line]
