"""listen: an ASGI application on a socket, until a signal says stop."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from emberline.core.errors import InvalidRequest


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as e:
        listener.close()
        raise InvalidRequest(f"cannot listen on {host}:{port}: {e}", hint="choose another --port") from e
    return listener


async def listen(
    app: Any,
    listener: socket.socket,
    ready: Callable[[], None],
    leaving: Callable[[], Awaitable[None]] | None = None,
    *,
    largest_message: int = 0,
    proxied: bool = True,
) -> None:
    """`ready` is called when connections are taken, `leaving` before they no longer are. `largest_message`: bytes of
    one over a WebSocket; 0: there are none. `proxied`: for whom a proxy in front speaks is looked up."""
    import uvicorn

    place = ":".join(map(str, listener.getsockname()[:2]))

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if not _listens(listener):
                # Two that start together can both bind; only one can listen, and the loop does not tell the other.
                raise InvalidRequest(f"another process listens on {place}", hint="choose another --port")
            ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if leaving is not None:
                await leaving()
            await super().shutdown(sockets)

    settings = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="websockets-sansio" if largest_message else "none",
        ws_max_size=largest_message,
        proxy_headers=proxied,
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=10,
    )
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal that stopped it once more when it has: what its caller began has still to be ended.
        signal.signal(signal.SIGTERM, lambda *_: None)
    await Server(settings).serve([listener])


def _listens(listener: socket.socket) -> bool:
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False  # the event loop has closed it
