"""WorkerClient: HTTP requests to workers over pooled connections.

A request is never repeated here: a lost connection may mean that the worker died, possibly because of this request."""

from __future__ import annotations

import functools
from types import TracebackType
from urllib.parse import urlsplit

from emberline.net.errors import Broken, Unreached
from emberline.net.pool import Pool
from emberline.net.reply import Reply
from emberline.router.call import Call

__all__ = ["Broken", "Reply", "Unreached", "Upstream"]

CONNECT = 2.0
IDLE = 3.0  # shorter than workers' own, so that a worker never closes a connection on which a request was just sent


class Upstream:
    def __init__(self) -> None:
        self._pool = Pool(connect=CONNECT, idle=IDLE)

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    async def request(self, at: str, call: Call) -> Reply:
        """Send a request and return the reply, which the caller must close.

        `url` is the worker's; a path in it precedes the request's path, as behind a reverse proxy. Raises the errors of
        `net.errors` if the worker cannot be reached or the connection breaks."""
        origin, prefix = _split_url(at)
        return await self._pool.ask(origin, call.method, prefix + call.target, call.headers, call.body)


@functools.lru_cache(256)
def _split_url(url: str) -> tuple[str, str]:
    """Return the origin to connect to, and the path without a trailing slash."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
