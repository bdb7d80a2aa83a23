"""listen: an ASGI application on a socket, until a signal says stop."""

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

GOODBYE = 10.0  # seconds for what is under way to end
STOPS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises InvalidRequest if the port is taken, also by a process that is still loading: two
    sockets with SO_REUSEADDR can bind one address until one of them listens, so this one listens at once."""
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
        return "a port is between 0 and 65535"
    if error.errno == errno.EADDRINUSE:
        return "another process uses this port"
    return error.strerror or str(error)


def _hint(error: OSError | OverflowError, port: int) -> str:
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return "choose another --port" + (f"; `lsof -i :{port}` shows the process" if in_use else "")


def is_exposed(listener: socket.socket) -> bool:
    """Whether others than this machine can reach it."""
    return not is_loopback(listener.getsockname()[0])


def check_exposed(listener: socket.socket, *, authenticated: bool, is_open: bool, hint: str) -> None:
    """Raises InvalidRequest for a listener that anyone could use from another machine, unless that is meant.
    `hint`: how to authenticate."""
    if is_exposed(listener) and not (authenticated or is_open):
        host, port = listener.getsockname()[:2]
        listener.close()
        raise InvalidRequest(
            f"refusing to listen on {host}:{port} without authentication: other machines could use it",
            param="host",
            hint=f"{hint}, or --open if anyone may use it",
        )


async def answer_while_loading(listener: socket.socket) -> Server:
    """Take connections from now on and answer them with 503 until `listen` is called with this server."""
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
    """`ready` is called when requests are served, `leaving` before they no longer are. `largest_message`: bytes of
    one over a WebSocket; 0: there are none. `server`: the one that answered while the application was loading."""
    with _stopped() as stop:
        if server is None:
            server = Server(app, largest_message=largest_message)
            await server.start(listener)
        else:
            server.host.app = app
        gc.freeze()  # what there is by now stays: to look through all of it again stops everything for 26 ms
        ready()
        await stop.wait()
        if count := server.open_requests:
            log.info("stopping: open requests get up to %g s to end (%d open)", GOODBYE, count)
        if leaving is not None:
            await leaving()
        await server.stop(GOODBYE)
    listener.close()


@contextmanager
def _stopped() -> Iterator[asyncio.Event]:
    """An event that a signal sets; to threads that are not the first there come none."""
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    loop = asyncio.get_running_loop()
    for each in STOPS:
        loop.add_signal_handler(each, stop.set)
    try:
        yield stop
    finally:
        for each in STOPS:
            loop.remove_signal_handler(each)
        signal.signal(signal.SIGTERM, lambda *_: None)  # what our caller began has still to be ended
