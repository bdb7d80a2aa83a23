"""HTTPClientConnection: an HTTP/1.1 connection to a server. It carries one request at a time and is reused.

While the caller reads a reply slowly, reading from the socket pauses, so that the memory for unread data is bounded.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from typing import cast

import httptools

from emberline.net.deadline_timer import DeadlineTimer
from emberline.net.errors import UpstreamBroken, UpstreamTimeout

NO_TIMEOUT_S = math.inf
MAX_BUFFERED_BYTES = 1 << 16  # above it, reading from the socket pauses
MAX_HEAD_BYTES = 1 << 16  # of a reply's headers; likewise of its trailers
MAX_INFLATE_BYTES = 1 << 18  # of decompressed data before the event loop runs other tasks
TRUNCATED_BODY_MESSAGE = "the compressed body of the reply is cut off"


class HTTPClientConnection(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[bool] | None = None
        self._timer = DeadlineTimer(loop, self._on_deadline)  # ends the current wait
        self.is_closed = False
        self.idle_since = 0.0
        self._reset_response(False)

    def _reset_response(self, is_bodyless: bool) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self._head_size = 0  # bytes of the headers so far
        self._bytes_without_progress = 0  # bytes received since the head ended or since a piece of the body
        self._made_progress = False  # the last bytes received made progress
        self._has_head = False  # the whole head has arrived
        self._is_bodyless = is_bodyless
        self._chunks: list[bytes] = []
        self._size = 0
        self._paused = False
        self._inflater: zlib._Decompress | None = None
        self._has_compressed_data = False  # some compressed data has arrived
        self._compressed = b""  # received data that is not decompressed yet
        self._message_ended = False  # the whole reply has arrived, decompressed or not
        self._error: UpstreamBroken | None = None
        self._keep_alive = False
        self.is_complete = False
        self.is_silent = True  # no byte of the reply has arrived

    # -- an exchange ---------------------------------------------------------------------------------------------------

    def send(self, method: str, head: bytes, body: bytes) -> None:
        assert self._transport is not None and not self.is_closed
        self._reset_response(method == "HEAD")
        if len(body) < MAX_BUFFERED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    async def wait_for_head(self, timeout_s: float) -> None:
        """Wait until the reply's status and headers have arrived. Raises UpstreamTimeout or UpstreamBroken."""
        deadline = self._loop.time() + timeout_s
        while not self._has_head and self._error is None:
            if not await self._wait_for_data(deadline - self._loop.time()):
                raise UpstreamTimeout(f"the server sent no reply within {timeout_s:.3g} s")
        if not self._has_head:
            assert self._error is not None
            raise self._error

    async def read(self, timeout_s: float) -> bytes:
        """Return the next bytes of the reply's body, or b"" at the body's end.

        Raises UpstreamTimeout if no byte arrives for `timeout_s`, and UpstreamBroken if the connection fails.
        """
        while not self._chunks:
            if self._error is None and self._compressed:
                await asyncio.sleep(0)  # a little compressed data may be much: other tasks run between two pieces
                self._inflate_next_chunk()
                continue
            if self._error is not None:
                raise self._error
            if self.is_complete:
                return b""
            if not await self._wait_for_data(timeout_s):
                raise UpstreamTimeout(f"the server sent no data for {timeout_s:.3g} s in the middle of a reply")
        return self.take_received()

    def take_received(self) -> bytes:
        """Return the bytes of the body that have arrived and were not read yet, without waiting."""
        chunks, self._chunks, self._size = self._chunks, [], 0
        if self._paused and not self._compressed:
            self._paused = False
            if self._transport is not None and not self.is_closed:
                self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _wait_for_data(self, timeout_s: float) -> asyncio.Future[bool]:
        """Return a future whose result is True when data arrives, or False when `timeout_s` have passed."""
        assert self._waiter is None or self._waiter.done(), "the connection is already being read"
        self._waiter = waiter = self._loop.create_future()
        if timeout_s <= 0:
            waiter.set_result(False)
            return waiter
        self._timer.set(self._loop.time() + timeout_s)
        return waiter

    def _on_deadline(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def is_reusable(self) -> bool:
        """Return whether the reply is complete and the connection can carry the next request."""
        return self.is_complete and self._keep_alive and not self._chunks and self._error is None and not self.is_closed

    def fail(self, reason: str) -> None:
        """Close the connection and make the waiting read raise UpstreamBroken.

        If the whole reply has already arrived, nothing happens.
        """
        if not self.is_complete:
            self._chunks, self._size = [], 0
            self._error = self._error or UpstreamBroken(reason)
            self.abort()
            self._wake_reader()

    def abort(self) -> None:
        self._timer.cancel()
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    # -- callbacks of the event loop -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        if self._message_ended or self.is_complete or self._error is not None:  # data without a request
            self.abort()
            return
        self.is_silent = self._made_progress = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, zlib.error, UpstreamBroken) as e:
            self._fail_parsing(e)
        self._bytes_without_progress = 0 if self._made_progress else self._bytes_without_progress + len(data)
        if self._bytes_without_progress > MAX_HEAD_BYTES and not self.is_closed:
            self._fail_parsing(self._head_too_large_error())
        if self._size + len(self._compressed) > MAX_BUFFERED_BYTES and not self._paused and not self.is_closed:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()
        self._wake_reader()

    def _fail_parsing(self, error: Exception) -> None:
        if not self.is_complete:  # else the bad data followed a complete reply
            cause = error.__context__ if isinstance(error.__context__, UpstreamBroken) else error
            what = f"the reply is not valid HTTP/1.1: {type(error).__name__}: {error}"
            self._error = cause if isinstance(cause, UpstreamBroken) else UpstreamBroken(what)
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self.is_closed = True
        if not self.is_complete and self._error is None and not self._message_ended:
            if error is None and self._has_head and not {"content-length", "transfer-encoding"} & self.headers.keys():
                self._message_ended = True  # a reply without a length ends with the connection
                self.is_complete = not self._compressed and not self._is_compressed_body_truncated
                self._error = (
                    UpstreamBroken(TRUNCATED_BODY_MESSAGE)
                    if self._is_compressed_body_truncated and not self._compressed
                    else None
                )
            else:
                where = "within a reply" if self._has_head else "before a reply"
                self._error = UpstreamBroken(
                    f"the server closed the connection {where}" + (f" ({error})" if error else "")
                )
        self._wake_reader()

    # -- callbacks of the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._message_ended or self.is_complete:
            raise UpstreamBroken("the server sent two replies to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        if self._head_size > MAX_HEAD_BYTES:
            raise self._head_too_large_error()
        if self._has_head:  # a trailer
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if 100 <= self.status < 200:
            self.headers, self._head_size = {}, 0
            return
        self._has_head = self._made_progress = True
        self._head_size = 0
        if (coding := self.headers.get("content-encoding", "identity").lower()) != "identity":
            if coding not in ("gzip", "deflate"):
                raise UpstreamBroken(
                    f"the reply has content-encoding {coding[:40]!r}; only gzip and deflate are supported"
                )
            self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
        if self._is_bodyless:  # the parser would wait for a body: it does not see that the request was HEAD
            self.is_complete = True

    def on_body(self, body: bytes) -> None:
        self._made_progress = True
        if self._inflater is not None:
            self._has_compressed_data = True
            self._compressed += body
            if not self._chunks:
                self._inflate_chunk()
        elif body:
            self._chunks.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        if self._has_head:  # else it was an informational (1xx) reply
            self._message_ended = True
            self._keep_alive = not self._is_bodyless and self._parser.should_keep_alive()
            self._complete_if_all_inflated()

    def _complete_if_all_inflated(self) -> None:
        if self._message_ended and not self._compressed:
            if self._is_compressed_body_truncated:
                raise UpstreamBroken(TRUNCATED_BODY_MESSAGE)
            self.is_complete = True

    def _inflate_next_chunk(self) -> None:
        """Decompress the next chunk of the body, when the caller has read all chunks before it."""
        try:
            self._inflate_chunk()
            self._complete_if_all_inflated()
        except (zlib.error, UpstreamBroken) as e:
            self._fail_parsing(e)
        if not self._compressed and self._paused and self._transport is not None and not self.is_closed:
            self._paused = False
            self._transport.resume_reading()

    def _inflate_chunk(self) -> None:
        assert self._inflater is not None
        if self._inflater.eof:
            raise UpstreamBroken("extra data follows the compressed body of the reply")
        data = self._inflater.decompress(self._compressed, MAX_INFLATE_BYTES)
        self._compressed = self._inflater.unconsumed_tail
        if self._inflater.unused_data:
            raise UpstreamBroken("extra data follows the compressed body of the reply")
        if data:
            self._chunks.append(data)
            self._size += len(data)

    @property
    def _is_compressed_body_truncated(self) -> bool:
        return self._inflater is not None and self._has_compressed_data and not self._inflater.eof

    def _head_too_large_error(self) -> UpstreamBroken:
        part = "trailer" if self._has_head else "head"
        return UpstreamBroken(f"the {part} of the reply is larger than the limit of {MAX_HEAD_BYTES} bytes")
