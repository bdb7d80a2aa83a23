"""HTTPServer: runs an ASGI application on a listening socket, from start to graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from itertools import islice

from emberline.net.descriptors import CHECK_INTERVAL_S, descriptor_watch
from emberline.net.server_connection import HTTPServerConnection
from emberline.net.server_state import App, ServerState

LISTEN_BACKLOG = 2048  # connections that wait to be accepted
TLS_HANDSHAKE_TIMEOUT_S = 10.0
TLS_SHUTDOWN_TIMEOUT_S = 2.0  # for the client to confirm the end of a connection


class HTTPServer:
    def __init__(self, app: App, *, max_message_bytes: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """`max_message_bytes` limits the size of a WebSocket message. If it is 0, WebSockets are rejected.

        Without `tls`, the server uses plain HTTP.
        """
        self.state = ServerState(app, max_message_bytes=max_message_bytes)
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._descriptor_check: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket) -> None:
        state = self.state
        self._listener = await state.loop.create_server(
            lambda: HTTPServerConnection(state),
            sock=listener,
            backlog=LISTEN_BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S if self._tls else None,
            ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S if self._tls else None,
        )
        self._check_descriptors(listener)

    def _check_descriptors(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # still open
            missing = descriptor_watch.check(listener.fileno())
            idle = (connection for connection in self.state.connections if connection.is_idle)
            for connection in list(islice(idle, missing)):
                connection.abort()
                descriptor_watch.record_shortage(len(self.state.connections), rejected=False)
            self._descriptor_check = self.state.loop.call_later(CHECK_INTERVAL_S, self._check_descriptors, listener)

    @property
    def open_request_count(self) -> int:
        return len(self.state.tasks)

    async def stop(self, timeout_s: float) -> None:
        """Stop accepting connections and wait until the open requests have finished.

        Requests that are still open after `timeout_s` are aborted.
        """
        state = self.state
        if self._listener is not None:
            self._listener.close()
        if self._descriptor_check is not None:
            self._descriptor_check.cancel()
        for connection in list(state.connections):
            connection.close_when_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while state.connections or state.tasks:
                    await asyncio.sleep(0.02)
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        for connection in list(state.connections):
            connection.abort()
