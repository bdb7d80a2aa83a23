"""Upstream: requests to workers. What is lost on a connection that was kept may have been the worker, and the request
its death: nobody is asked again here."""

from __future__ import annotations

import functools
from types import TracebackType
from urllib.parse import urlsplit

from emberline.net.errors import Broken, Unreached
from emberline.net.pool import Pool
from emberline.net.reply import Reply
from emberline.router.call import Call

__all__ = ["Broken", "Reply", "Unreached", "Upstream"]

CONNECT = 2.0  # seconds
IDLE = 3.0  # seconds a connection is kept: less than workers keep it, who would close it under a request


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
        """`at`: the worker's URL; a path in it stands before that of the call, as behind a reverse proxy. The reply is
        the caller's to close."""
        origin, prefix = _split_url(at)
        return await self._pool.ask(origin, call.method, prefix + call.target, call.headers, call.body)


@functools.lru_cache(256)
def _split_url(url: str) -> tuple[str, str]:
    """What to connect to, and the path without a slash at its end."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
