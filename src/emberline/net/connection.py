"""Connection: HTTP/1.1 to one place, one request at a time, kept from one to the next. What has come and was not taken
yet is bounded: who reads slowly is sent slowly. Little else, because every event of every stream passes here."""

from __future__ import annotations

import asyncio
import math
import zlib
from typing import cast

import httptools

from emberline.net.errors import Broken, TimedOut

FOREVER = math.inf  # seconds
BUFFER = 1 << 16  # bytes of a reply that may wait here before its sender has to
LARGEST_HEAD = 1 << 16  # bytes of a reply's headers; of its trailers
INFLATED_AT_ONCE = 1 << 18  # bytes that are unpacked between two turns of the event loop
CUT_OFF = "what the reply had packed is cut off"


class Connection(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[bool] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the one who waits has waited long enough
        self.closed = False
        self.idle_since = 0.0
        self._begin(False)

    def _begin(self, bodyless: bool) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self._head_size = 0  # bytes of headers
        self._extra = 0  # of all that came since they were whole, or since a piece of the body
        self._moved = False  # what came last had one of those
        self._headed = False  # the head is whole
        self._bodyless = bodyless
        self._chunks: list[bytes] = []
        self._size = 0
        self._paused = False
        self._inflater: zlib._Decompress | None = None
        self._packed = False  # some of what it is to inflate has come
        self._tail = b""  # what has come and is not inflated yet
        self._message_ended = False  # all of it has come, inflated or not
        self._error: Broken | None = None
        self._keep = False
        self.complete = False
        self.silent = True  # not one byte has come

    # -- an exchange ---------------------------------------------------------------------------------------------------

    def send(self, method: str, head: bytes, body: bytes) -> None:
        assert self._transport is not None and not self.closed
        self._begin(method == "HEAD")
        if len(body) < BUFFER:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    async def head(self, seconds: float) -> None:
        """Until `status` and `headers` are there."""
        until = self._loop.time() + seconds
        while not self._headed and self._error is None:
            if not await self._wait(until - self._loop.time()):
                raise TimedOut(f"no reply began within {seconds:.3g} s")
        if not self._headed:
            assert self._error is not None
            raise self._error

    async def read(self, seconds: float) -> bytes:
        """What has come, b"" at the end."""
        while not self._chunks:
            if self._error is None and self._tail:
                await asyncio.sleep(0)  # a little packed may be much: others have their turn between two pieces
                self._inflate_next()
                continue
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            if not await self._wait(seconds):
                raise TimedOut(f"nothing came for {seconds:.3g} s in the middle of a reply")
        return self.taken()

    def taken(self) -> bytes:
        """What has come, without waiting."""
        chunks, self._chunks, self._size = self._chunks, [], 0
        if self._paused and not self._tail:
            self._paused = False
            if self._transport is not None and not self.closed:
                self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _wait(self, seconds: float) -> asyncio.Future[bool]:
        """Until something comes; False: nothing came."""
        assert self._waiter is None or self._waiter.done(), "one reader at a time"
        self._waiter = waiter = self._loop.create_future()
        if seconds <= 0:
            waiter.set_result(False)
            return waiter
        self._due = self._loop.time() + seconds
        if self._due < FOREVER and (self._alarm is None or self._due < self._alarm.when()):
            self._set_alarm()
        return waiter

    def _set_alarm(self) -> None:
        """One for many waits: it is moved when it goes off too early, not each time something comes, and going off
        while nobody waits it does nothing."""
        self._unset_alarm()
        self._alarm = self._loop.call_at(self._due, self._rings)

    def _unset_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _rings(self) -> None:
        self._alarm = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() >= self._due:
            self._waiter.set_result(False)
        elif self._due < FOREVER:
            self._set_alarm()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def rest(self) -> bool:
        """The exchange is over. True: there can be another. The alarm stays set, for that one."""
        return self.complete and self._keep and not self._chunks and self._error is None and not self.closed

    def cut(self, reason: str) -> None:
        """Whoever reads learns at once that the reply broke, unless all of it has come."""
        if not self.complete:
            self._chunks, self._size = [], 0
            self._error = self._error or Broken(reason)
            self.abort()
            self._wake()

    def abort(self) -> None:
        self._unset_alarm()
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # -- told by the loop ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by descent

    def data_received(self, data: bytes) -> None:
        if self._message_ended or self.complete or self._error is not None:  # nobody asked
            self.abort()
            return
        self.silent = self._moved = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, zlib.error, Broken) as e:
            self._failed(e)
        self._extra = 0 if self._moved else self._extra + len(data)
        if self._extra > LARGEST_HEAD and not self.closed:
            self._failed(self._large())
        if self._size + len(self._tail) > BUFFER and not self._paused and not self.closed:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def _failed(self, error: Exception) -> None:
        if not self.complete:  # else it is what followed a good reply, which nobody asked for
            said = error.__context__ if isinstance(error.__context__, Broken) else error
            what = f"the reply is not HTTP ({type(error).__name__}: {error})"
            self._error = said if isinstance(said, Broken) else Broken(what)
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._unset_alarm()
        self.closed = True
        if not self.complete and self._error is None and not self._message_ended:
            if error is None and self._headed and not {"content-length", "transfer-encoding"} & self.headers.keys():
                self._message_ended = True  # its end is the connection's
                self.complete = not self._tail and not self._cut_off
                self._error = Broken(CUT_OFF) if self._cut_off and not self._tail else None
            else:
                where = "in the middle of a reply" if self._headed else "before a reply began"
                self._error = Broken(f"the connection ended {where}" + (f" ({error})" if error else ""))
        self._wake()

    # -- told by the parser --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._message_ended or self.complete:
            raise Broken("there are two replies to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        if self._head_size > LARGEST_HEAD:
            raise self._large()
        if self._headed:  # it is a trailer
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if 100 <= self.status < 200:
            self.headers, self._head_size = {}, 0
            return
        self._headed = self._moved = True
        self._head_size = 0
        if (coding := self.headers.get("content-encoding", "identity").lower()) != "identity":
            if coding not in ("gzip", "deflate"):
                raise Broken(f"the reply is in an encoding that was not asked for: {coding[:40]}")
            self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
        if self._bodyless:  # which the parser does not know: it would wait for one
            self.complete = True

    def on_body(self, body: bytes) -> None:
        self._moved = True
        if self._inflater is not None:
            self._packed = True
            self._tail += body
            if not self._chunks:
                self._inflate()
        elif body:
            self._chunks.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        if self._headed:  # else it was a provisional one
            self._message_ended = True
            self._keep = not self._bodyless and self._parser.should_keep_alive()
            self._complete_if_inflated()

    def _complete_if_inflated(self) -> None:
        if self._message_ended and not self._tail:
            if self._cut_off:
                raise Broken(CUT_OFF)
            self.complete = True

    def _inflate_next(self) -> None:
        """One more piece, for a reader that has taken all before it."""
        try:
            self._inflate()
            self._complete_if_inflated()
        except (zlib.error, Broken) as e:
            self._failed(e)
        if not self._tail and self._paused and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()

    def _inflate(self) -> None:
        assert self._inflater is not None
        if self._inflater.eof:
            raise Broken("more follows what the reply had packed")
        made = self._inflater.decompress(self._tail, INFLATED_AT_ONCE)
        self._tail = self._inflater.unconsumed_tail
        if self._inflater.unused_data:
            raise Broken("more follows what the reply had packed")
        if made:
            self._chunks.append(made)
            self._size += len(made)

    @property
    def _cut_off(self) -> bool:
        return self._inflater is not None and self._packed and not self._inflater.eof

    def _large(self) -> Broken:
        return Broken(f"the reply's {'trailer' if self._headed else 'head'} has more than {LARGEST_HEAD} bytes")
