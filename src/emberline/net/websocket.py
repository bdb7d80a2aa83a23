"""WebSocket: a connection that has become one, as ASGI says it. What was not taken yet is one message: the next is read
when that one is; who does not answer a ping until the next one is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, cast

from websockets.datastructures import Headers
from websockets.exceptions import InvalidState
from websockets.extensions.permessage_deflate import ServerPerMessageDeflateFactory
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from emberline.net.host import Host

log = logging.getLogger("emberline.net")

PING = 20.0  # seconds between two
FRAGMENT_BYTES = 1 << 16  # of a message that is sent
GOODBYE = 10.0  # seconds for the other side to close, too
_STATUSES = frozenset(HTTPStatus)
_SMALL = {"server_max_window_bits": 12, "client_max_window_bits": 12, "compress_settings": {"memLevel": 5}}


class WebSocket(asyncio.Protocol):
    def __init__(self, host: Host, scope: dict[str, Any]) -> None:
        self._host = host
        self._scope = scope
        self._loop = host.loop
        self._transport: asyncio.Transport | None = None
        self._talk = ServerProtocol(
            extensions=[ServerPerMessageDeflateFactory(**_SMALL)],  # type: ignore[arg-type]
            max_size=host.largest_message,
            logger=log,
        )
        self._response: Response | None = None  # what is answered if the application wants to
        self._refusal: tuple[int, Headers] | None = None  # its head, if it does not
        self._task: asyncio.Task[None] | None = None
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._frames: list[bytes] = []  # of a message that is not whole
        self._text = True  # it is one
        self._writable = asyncio.Event()
        self._writable.set()
        self._message = asyncio.Lock()  # held while one is sent: no other may begin between its fragments
        self._over = False  # nothing is sent any more
        self._asked = False  # the last ping has no answer yet
        self._timer: asyncio.TimerHandle | None = None

    # -- for the server ------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        self._hang_up(CloseCode.SERVICE_RESTART)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- told by the loop ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._host.guests.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._host.guests.discard(self)
        self._end(CloseCode.ABNORMAL_CLOSURE)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._talk.receive_data(data)
        for event in self._talk.events_received():
            if isinstance(event, Request):
                self._asked_for(event)
            elif isinstance(event, Frame):
                self._heard(event)
        self._flush()
        if self._response is None and self._talk.handshake_exc is not None and not self._over:
            # it has a body, or is larger than this one reads
            self._refused(HTTPStatus.BAD_REQUEST, Headers(), b"")
        elif self._talk.close_rcvd is not None:
            self._end(self._talk.close_rcvd.code)
            self._close()
        elif self._talk.parser_exc is not None and not self._over:
            said = self._talk.close_sent
            self._end(said.code if said is not None else CloseCode.PROTOCOL_ERROR)
            self._linger()

    def _asked_for(self, request: Request) -> None:
        self._response = self._talk.accept(request)
        if self._response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._talk.send_response(self._response)
            self._flush()
            self._close()
            return
        offered = request.headers.get_all("Sec-WebSocket-Protocol")
        self._scope["subprotocols"] = [each.strip() for line in offered for each in line.split(",")]
        self._scope["extensions"] = {"websocket.http.response": {}}
        self._messages.put_nowait({"type": "websocket.connect"})
        self._task = self._loop.create_task(self._run())
        self._host.work.add(self._task)
        self._task.add_done_callback(self._host.work.discard)

    def _heard(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self._asked = False
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT) or self._over:
            return
        if frame.opcode is not Opcode.CONT:
            self._text = frame.opcode is Opcode.TEXT
        self._frames.append(bytes(frame.data))  # no copy, where it is bytes
        if not frame.fin:
            return
        frames, self._frames = self._frames, []
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        try:
            said = {"text": data.decode()} if self._text else {"bytes": data}
        except UnicodeDecodeError:
            self._hang_up(CloseCode.INVALID_DATA)
            return
        self._messages.put_nowait({"type": "websocket.receive", **said})
        assert self._transport is not None
        self._transport.pause_reading()

    # -- for the application -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._host.app(self._scope, self.receive, self.send)
        except Exception:
            log.exception("WebSocket %s", self._scope["path"])
        if self._timer is None and not self._over:  # it was never accepted
            self._refused(HTTPStatus.INTERNAL_SERVER_ERROR, Headers(), b"")
        self._hang_up(CloseCode.NORMAL_CLOSURE)

    async def receive(self) -> dict[str, Any]:
        message = await self._messages.get()
        if self._messages.empty() and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        return message

    async def send(self, message: dict[str, Any]) -> None:
        """To one who has left nothing is said."""
        await self._writable.wait()
        if self._over:
            return
        match message["type"]:
            case "websocket.accept":
                self._accepted(message.get("subprotocol"), message.get("headers", ()))
            case "websocket.send":
                async with self._message:
                    await self._said(message)
            case "websocket.close":
                self._hang_up(message.get("code", CloseCode.NORMAL_CLOSURE), message.get("reason") or "")
            case "websocket.http.response.start":
                pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
                self._refusal = message["status"], Headers(pairs)
            case "websocket.http.response.body":
                assert self._refusal is not None and not message.get("more_body")
                self._refused(*self._refusal, message["body"])
            case other:
                raise AssertionError(f"{other} is nothing that a WebSocket is told")

    def _accepted(self, subprotocol: str | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
        assert self._response is not None and self._timer is None
        for name, value in headers:
            self._response.headers[name.decode("latin-1")] = value.decode("latin-1")
        if subprotocol is not None:
            self._response.headers["Sec-WebSocket-Protocol"] = subprotocol
        self._talk.send_response(self._response)
        self._flush()
        self._timer = self._loop.call_later(PING, self._ping)

    async def _said(self, message: dict[str, Any]) -> None:
        """A large message goes in fragments: compressing 30 MB in one go would take a second. Other connections have
        their turn between two, and a client that does not read is not written to."""
        text = message.get("text")
        data = message["bytes"] if text is None else text.encode()
        send: Callable[..., None] = self._talk.send_binary if text is None else self._talk.send_text
        at = 0
        try:
            while len(data) - at > FRAGMENT_BYTES:
                send(data[at : at + FRAGMENT_BYTES], fin=False)
                self._flush()
                send, at = self._talk.send_continuation, at + FRAGMENT_BYTES
                await asyncio.sleep(0)
                await self._writable.wait()
            send(data[at:] if at else data, fin=True)
        except InvalidState:
            return  # it is closing
        except asyncio.CancelledError:  # in the middle of a message, so that there can be no other
            self._hang_up(CloseCode.INTERNAL_ERROR)
            raise
        self._flush()

    def _refused(self, status: int, headers: Headers, body: bytes) -> None:
        headers["Content-Length"], headers["Connection"] = str(len(body)), "close"
        phrase = HTTPStatus(status).phrase if status in _STATUSES else ""
        if self._transport is not None:
            self._transport.write(Response(status, phrase, headers, body).serialize())
        self._end(CloseCode.ABNORMAL_CLOSURE)
        self._close()

    # ------------------------------------------------------------------------------------------------------------------

    def _ping(self) -> None:
        if self._over:
            return
        if self._asked:
            self._hang_up(CloseCode.INTERNAL_ERROR, "no answer to a ping")
            self._close()
            return
        self._asked = True
        self._talk.send_ping(b"")
        self._flush()
        self._timer = self._loop.call_later(PING, self._ping)

    def _hang_up(self, code: int, reason: str = "") -> None:
        """It says so; the other side says so, too, and closes, or is closed."""
        if self._over or self._transport is None:
            return
        accepted = self._timer is not None
        self._end(code)
        if accepted:
            self._talk.send_close(code, reason)
            self._flush()
            self._transport.resume_reading()
            self._timer = self._loop.call_later(GOODBYE, self._close)
        else:
            self._close()

    def _end(self, code: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._over:
            self._over = True
            self._messages.put_nowait({"type": "websocket.disconnect", "code": code})
        self._writable.set()  # nobody is told that it is, once it is gone

    def _linger(self) -> None:
        """The other side is told that it was wrong. What it still sends is taken, and thrown away: to close before
        would reset the connection, and it might never read why."""
        assert self._transport is not None
        self._transport.write_eof()
        self._transport.resume_reading()
        self._timer = self._loop.call_later(GOODBYE, self._close)

    def _flush(self) -> None:
        if self._transport is not None and (data := b"".join(self._talk.data_to_send())):
            self._transport.write(data)

    def _close(self) -> None:
        """When all that was written is sent, or was not taken for as long again."""
        if self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self._timer = self._loop.call_later(GOODBYE, self.abort)
