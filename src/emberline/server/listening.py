"""serve_until_stopped: an ASGI application on a listening socket, until a signal stops it."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from emberline.core.errors import InvalidRequest, Loading
from emberline.net.host import App
from emberline.net.server import BACKLOG, Server
from emberline.server.exchange import Exchange, Receive, Scope, Send
from emberline.server.keys import is_loopback
from emberline.server.site import refuse

log = logging.getLogger("emberline.server")

GOODBYE = 10.0  # for open requests
STOPS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise InvalidRequest if the address cannot be used.

    Two sockets with SO_REUSEADDR can bind one address until one of them listens. So this one listens at once, and a
    port that a loading server has taken is detected too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as e:
        listener.close()
        raise InvalidRequest(f"cannot listen on {host}:{port}: {_why(e)}", hint=_hint(e, port)) from e
    return listener


def _why(error: OSError | OverflowError) -> str:
    if not isinstance(error, OSError):
        return "a port must be between 0 and 65535"
    if error.errno == errno.EADDRINUSE:
        return "another process is listening on this port"
    return error.strerror or str(error)


def _hint(error: OSError | OverflowError, port: int) -> str:
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return "choose another --port" + (f"; `lsof -i :{port}` shows the process" if in_use else "")


def is_exposed(listener: socket.socket) -> bool:
    """Whether other machines can reach this listener."""
    return not is_loopback(listener.getsockname()[0])


def check_exposed(listener: socket.socket, *, authenticated: bool, is_open: bool, hint: str) -> None:
    """Raise InvalidRequest if other machines could use this listener without authentication.

    `allows_anyone` permits that. `hint`: how to authenticate."""
    if is_exposed(listener) and not (authenticated or is_open):
        host, port = listener.getsockname()[:2]
        listener.close()
        raise InvalidRequest(
            f"refusing to listen on {host}:{port} without authentication: other machines could use it",
            param="host",
            hint=f"{hint}, or --open to allow anyone",
        )


async def answer_while_loading(listener: socket.socket) -> Server:
    """Accept connections and answer 503 until `serve_until_stopped` is called with this server."""
    server = Server(_loading)
    await server.start(listener)
    return server


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    x = Exchange(scope, receive, send)
    if x.path == "/health/live":
        await x.json({"status": "live"})
    elif x.path.startswith("/health"):
        await x.json({"status": "loading"}, Loading.status)
    else:
        await refuse(x, Loading())


async def listen(
    app: App,
    listener: socket.socket,
    ready: Callable[[], None],
    leaving: Callable[[], Awaitable[None]] | None = None,
    *,
    largest_message: int = 0,
    server: Server | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    `on_ready` is called when requests are served, `before_stop` before they no longer are. `max_message_bytes`: of a
    WebSocket message; 0: no WebSockets. `server`: the one that answered while the application was loading."""
    with _stopped() as stop:
        if server is None:
            server = Server(app, largest_message=largest_message)
            await server.start(listener)
        else:
            server.host.app = app
        gc.freeze()  # objects of the start are permanent: scanning them again would pause the process for 26 ms
        ready()
        await stop.wait()
        if count := server.open_requests:
            log.info("stopping, waiting for open requests: open=%d timeout_s=%g", count, GOODBYE)
        if leaving is not None:
            await leaving()
        await server.stop(GOODBYE)
    listener.close()


@contextmanager
def _stopped() -> Iterator[asyncio.Event]:
    """Yield an event that a stop signal sets; only the main thread receives signals."""
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    loop = asyncio.get_running_loop()
    for number in STOPS:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in STOPS:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, lambda *_: None)  # a second signal must not interrupt the caller's cleanup
