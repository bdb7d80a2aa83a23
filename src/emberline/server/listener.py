"""Serves an ASGI application on a listening socket until a signal stops the process."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from emberline.core.errors import EngineLoading, InvalidRequest
from emberline.core.freememory import free_memory
from emberline.net.body_budget import body_budget
from emberline.net.server import LISTEN_BACKLOG, HTTPServer
from emberline.net.server_state import App
from emberline.server.access import is_loopback
from emberline.server.exchange import Exchange, Receive, Scope, Send
from emberline.server.route_table import reply_error

log = logging.getLogger("emberline.server")

SHUTDOWN_TIMEOUT_S = 10.0  # for open requests
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bind_listener(host: str, port: int, *, option_prefix: str = "--") -> socket.socket:
    """Return a listening socket. Raises InvalidRequest if the address cannot be used.

    `option_prefix`: the start of the option names in the error's hint; with "--metrics-", the hint names --metrics-host
    and --metrics-port.

    The socket listens at once. Otherwise a second server could bind the same port while the first one loads its model,
    because SO_REUSEADDR permits that until one of the sockets listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except (OSError, OverflowError) as e:
        listener.close()
        raise InvalidRequest(
            f"cannot listen on {host}:{port}: {_bind_error_reason(e)}", hint=_bind_error_hint(e, port, option_prefix)
        ) from e
    return listener


def _bind_error_reason(error: OSError | OverflowError) -> str:
    if not isinstance(error, OSError):
        return "a port must be between 0 and 65535"
    if error.errno == errno.EADDRINUSE:
        return "another process is listening on this port"
    return error.strerror or str(error)


def _bind_error_hint(error: OSError | OverflowError, port: int, option_prefix: str) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return f"{option_prefix}host must be an address of this machine, or 0.0.0.0 for all"
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return f"choose another {option_prefix}port" + (f"; `lsof -i :{port}` shows the process" if in_use else "")


def limit_silence(listener: socket.socket, timeout_s: int) -> None:
    """Close connections of this socket whose other end does not acknowledge data for `timeout_s` seconds.

    Without this, the system notices after 15 minutes or never that the other machine was switched off or is
    unreachable. A process that ends closes its connections itself. Systems other than Linux keep their defaults."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", timeout_s // 2),
        ("TCP_KEEPINTVL", timeout_s // 8),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", timeout_s * 1000),
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_exposed(listener: socket.socket) -> bool:
    """Return whether other machines can connect to this socket."""
    return not is_loopback(listener.getsockname()[0])


def check_exposure(listener: socket.socket, *, is_authenticated: bool, allows_anyone: bool, hint: str) -> None:
    """Raise InvalidRequest if other machines could use this socket without authentication.

    `allows_anyone`: the operator permits use without authentication. `hint` tells the operator how to require
    authentication."""
    if is_exposed(listener) and not (is_authenticated or allows_anyone):
        host, port = listener.getsockname()[:2]
        listener.close()
        raise InvalidRequest(
            f"refusing to listen on {host}:{port} without authentication: other machines could use it",
            param="host",
            hint=f"{hint}, or --open to allow anyone",
        )


async def answer_while_loading(listener: socket.socket, tls: ssl.SSLContext | None = None) -> HTTPServer:
    """Reply to all requests with status 503 until `serve_until_stopped` is called with the returned server.

    Only /health/live gets status 200."""
    server = HTTPServer(_reply_loading, tls=tls)
    await server.start(listener)
    return server


async def _reply_loading(scope: Scope, receive: Receive, send: Send) -> None:
    x = Exchange(scope, receive, send)
    if x.path == "/health/live":
        await x.reply_json({"status": "live"})
    elif x.path.startswith("/health"):
        await x.reply_json({"status": "loading"}, EngineLoading.status)
    else:
        await reply_error(x, EngineLoading())


async def serve_until_stopped(
    app: App,
    listener: socket.socket,
    on_ready: Callable[[], None],
    before_stop: Callable[[], Awaitable[None]] | None = None,
    *,
    max_message_bytes: int = 0,
    server: HTTPServer | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve the application until the process receives SIGTERM or SIGINT.

    `on_ready` is called when the server accepts requests, and `before_stop` after the signal, while the server still
    accepts requests. `max_message_bytes` limits the size of a WebSocket message; if it is 0, WebSockets are rejected.
    `server` is the server that `answer_while_loading` returned. Without `tls`, a new server uses plain HTTP."""
    body_budget.fit_to_memory(free_memory())
    with _watch_stop_signals() as stop:
        if server is None:
            server = HTTPServer(app, max_message_bytes=max_message_bytes, tls=tls)
            await server.start(listener)
        else:
            server.state.app = app
        gc.freeze()  # objects of the start are permanent: scanning them again would pause the process for 26 ms
        gc.enable()  # `emberline serve` disables it for the start
        on_ready()
        await stop.wait()
        if count := server.open_request_count:
            log.info("Stopping, waiting for open requests: open=%d timeout_s=%g", count, SHUTDOWN_TIMEOUT_S)
        if before_stop is not None:
            await before_stop()
        await server.stop(SHUTDOWN_TIMEOUT_S)
    listener.close()


@contextmanager
def _watch_stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that is set when the process receives SIGTERM or SIGINT. Works in the main thread only."""
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, lambda *_: None)  # a second signal must not interrupt the caller's cleanup
