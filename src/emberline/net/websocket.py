"""WebSocketConnection: an HTTP connection after its upgrade to a WebSocket, as the ASGI application sees it.

Messages are read only after the application has accepted the connection, which it does if the caller's key is valid.
The next message is read from the socket when the application has received the message before it. A message that is
arriving uses the memory for request bodies (`body_budget.py`). The server sends a
ping every PING_INTERVAL_S and closes the connection if a ping was not answered when the next one is due.
"""

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

from emberline.core.errors import BodyMemoryFull
from emberline.net.body_budget import BodyReservation, body_budget
from emberline.net.server_state import ServerState

log = logging.getLogger("emberline.net")

PING_INTERVAL_S = 20.0
MAX_FRAGMENT_BYTES = 1 << 16  # longer messages are sent in fragments
CLOSE_TIMEOUT_S = 10.0  # for the client to close its side
_STATUSES = frozenset(HTTPStatus)
_DEFLATE_SETTINGS = {"server_max_window_bits": 12, "client_max_window_bits": 12, "compress_settings": {"memLevel": 5}}


class WebSocketConnection(asyncio.Protocol):
    def __init__(self, state: ServerState, scope: dict[str, Any]) -> None:
        self._state = state
        self._scope = scope
        self._loop = state.loop
        self._transport: asyncio.Transport | None = None
        self._protocol = ServerProtocol(
            extensions=[ServerPerMessageDeflateFactory(**_DEFLATE_SETTINGS)],  # type: ignore[arg-type]
            max_size=state.max_message_bytes,
            logger=log,
        )
        self._response: Response | None = None  # accepts the upgrade; sent if the application accepts
        self._rejection: tuple[int, Headers] | None = None  # status and headers of the application's rejection
        self._task: asyncio.Task[None] | None = None
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._frames: list[bytes] = []  # of an incomplete message
        self._reservation = BodyReservation(body_budget, scope["client"][0])
        self._is_text = True  # the incomplete message is text
        self._writable = asyncio.Event()
        self._writable.set()
        self._send_lock = asyncio.Lock()  # held while a message is sent: fragments of two must not mix
        self._is_ended = False  # no more messages are sent
        self._awaits_pong = False  # the last ping has no pong yet
        self._timer: asyncio.TimerHandle | None = None

    # -- for the server ------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return False

    def close_when_idle(self) -> None:
        self._send_close(CloseCode.SERVICE_RESTART)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- callbacks of the event loop -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._state.connections[self] = None

    def connection_lost(self, error: Exception | None) -> None:
        self._state.connections.pop(self, None)
        self._reservation.release()
        self._mark_ended(CloseCode.ABNORMAL_CLOSURE)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._timer is not None and not self._is_ended:
            try:
                self._reservation.add(len(data))
            except BodyMemoryFull as error:
                self._send_close(CloseCode.TRY_AGAIN_LATER, error.message)
                return
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                self._handle_request(event)
            elif isinstance(event, Frame):
                self._handle_frame(event)
        self._flush_frames()
        if self._response is None and self._protocol.handshake_exc is not None and not self._is_ended:
            # The request has a body, or is larger than the library accepts.
            self._reject_upgrade(HTTPStatus.BAD_REQUEST, Headers(), b"")
        elif self._protocol.close_rcvd is not None:
            self._mark_ended(self._protocol.close_rcvd.code)
            self._close_transport()
        elif self._protocol.parser_exc is not None and not self._is_ended:
            sent = self._protocol.close_sent
            self._mark_ended(sent.code if sent is not None else CloseCode.PROTOCOL_ERROR)
            self._close_after_error()

    def _handle_request(self, request: Request) -> None:
        self._response = self._protocol.accept(request)
        if self._response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._protocol.send_response(self._response)
            self._flush_frames()
            self._close_transport()
            return
        offered = request.headers.get_all("Sec-WebSocket-Protocol")
        self._scope["subprotocols"] = [each.strip() for line in offered for each in line.split(",")]
        self._scope["extensions"] = {"websocket.http.response": {}}
        assert self._transport is not None
        self._transport.pause_reading()  # until the connection is accepted
        self._messages.put_nowait({"type": "websocket.connect"})
        self._task = self._loop.create_task(self._run())
        self._state.tasks.add(self._task)
        self._task.add_done_callback(self._state.tasks.discard)

    def _handle_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self._awaits_pong = False
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT) or self._is_ended:
            return
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._frames.append(bytes(frame.data))  # no copy if the data is bytes
        if not frame.fin:
            return
        frames, self._frames = self._frames, []
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        try:
            content = {"text": data.decode()} if self._is_text else {"bytes": data}
        except UnicodeDecodeError:
            self._send_close(CloseCode.INVALID_DATA)
            return
        self._messages.put_nowait({"type": "websocket.receive", **content})
        assert self._transport is not None
        self._transport.pause_reading()

    # -- for the application -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._state.app(self._scope, self.receive, self.send)
        except Exception:
            log.exception("WebSocket failed: path=%s", self._scope["path"])
        if self._timer is None and not self._is_ended:  # the application never accepted
            self._reject_upgrade(HTTPStatus.INTERNAL_SERVER_ERROR, Headers(), b"")
        self._send_close(CloseCode.NORMAL_CLOSURE)

    async def receive(self) -> dict[str, Any]:
        message = await self._messages.get()
        if self._messages.empty() and self._timer is not None:  # the connection is accepted
            self._reservation.release()
            self._resume_reading()
        return message

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    async def send(self, message: dict[str, Any]) -> None:
        """Send an ASGI message to the client. If the connection is closed, the message is dropped."""
        await self._writable.wait()
        if self._is_ended:
            return
        match message["type"]:
            case "websocket.accept":
                self._accept_upgrade(message.get("subprotocol"), message.get("headers", ()))
            case "websocket.send":
                async with self._send_lock:
                    await self._send_message(message)
            case "websocket.close":
                self._send_close(message.get("code", CloseCode.NORMAL_CLOSURE), message.get("reason") or "")
            case "websocket.http.response.start":
                pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
                self._rejection = message["status"], Headers(pairs)
            case "websocket.http.response.body":
                assert self._rejection is not None and not message.get("more_body")
                self._reject_upgrade(*self._rejection, message["body"])
            case other:
                raise AssertionError(f"unknown ASGI message type for a WebSocket: {other}")

    def _accept_upgrade(self, subprotocol: str | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
        assert self._response is not None and self._timer is None
        for name, value in headers:
            self._response.headers[name.decode("latin-1")] = value.decode("latin-1")
        if subprotocol is not None:
            self._response.headers["Sec-WebSocket-Protocol"] = subprotocol
        self._protocol.send_response(self._response)
        self._flush_frames()
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._send_ping)
        self._resume_reading()

    async def _send_message(self, message: dict[str, Any]) -> None:
        """Send a message. A message larger than MAX_FRAGMENT_BYTES is sent in fragments.

        Other tasks run between two fragments: compressing 30 MB at once would block the event loop for a second.
        """
        text = message.get("text")
        data = message["bytes"] if text is None else text.encode()
        send: Callable[..., None] = self._protocol.send_binary if text is None else self._protocol.send_text
        start = 0
        try:
            while len(data) - start > MAX_FRAGMENT_BYTES:
                send(data[start : start + MAX_FRAGMENT_BYTES], fin=False)
                self._flush_frames()
                send, start = self._protocol.send_continuation, start + MAX_FRAGMENT_BYTES
                await asyncio.sleep(0)
                await self._writable.wait()
            send(data[start:] if start else data, fin=True)
        except InvalidState:
            return  # the connection is closing
        except asyncio.CancelledError:  # within a message, so no other can follow
            self._send_close(CloseCode.INTERNAL_ERROR)
            raise
        self._flush_frames()

    def _reject_upgrade(self, status: int, headers: Headers, body: bytes) -> None:
        headers["Content-Length"], headers["Connection"] = str(len(body)), "close"
        phrase = HTTPStatus(status).phrase if status in _STATUSES else ""
        if self._transport is not None:
            self._transport.write(Response(status, phrase, headers, body).serialize())
        self._mark_ended(CloseCode.ABNORMAL_CLOSURE)
        self._close_transport()

    # ------------------------------------------------------------------------------------------------------------------

    def _send_ping(self) -> None:
        if self._is_ended:
            return
        if self._awaits_pong:
            self._send_close(CloseCode.INTERNAL_ERROR, "no answer to a ping")
            self._close_transport()
            return
        self._awaits_pong = True
        self._protocol.send_ping(b"")
        self._flush_frames()
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._send_ping)

    def _send_close(self, code: int, reason: str = "") -> None:
        """Send a close frame. The connection is closed when the client answers it, or after CLOSE_TIMEOUT_S."""
        if self._is_ended or self._transport is None:
            return
        is_accepted = self._timer is not None
        self._mark_ended(code)
        if is_accepted:
            self._protocol.send_close(code, reason)
            self._flush_frames()
            self._transport.resume_reading()
            self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._close_transport)
        else:
            self._close_transport()

    def _mark_ended(self, code: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_ended:
            self._is_ended = True
            self._messages.put_nowait({"type": "websocket.disconnect", "code": code})
        self._writable.set()  # asyncio does not call resume_writing for a closed connection

    def _close_after_error(self) -> None:
        """Close the connection after invalid input of the client, and discard what the client still sends.

        Closing the connection at once would reset it, and the client might never read the close frame.
        """
        assert self._transport is not None
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()
        self._transport.resume_reading()
        self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._close_transport)

    def _flush_frames(self) -> None:
        if self._transport is not None and (data := b"".join(self._protocol.data_to_send())):
            self._transport.write(data)

    def _close_transport(self) -> None:
        """Close the connection when all data is sent, or when CLOSE_TIMEOUT_S has passed."""
        if self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self.abort)
