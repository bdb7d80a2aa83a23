"""HTTPConnectionPool.fetch returns whole replies within one time limit."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest
from raw_http import answer, body_of, run

from emberline.net.connection_pool import FetchedReply, HTTPConnectionPool
from emberline.net.errors import UpstreamBroken, UpstreamTimeout, UpstreamUnreachable
from emberline.net.server import HTTPServer
from emberline.net.server_state import Receive, Send


async def describe_request(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    query = scope["query_string"].decode()
    body = f"{scope['method']} {scope['path']}?{query} {(await body_of(receive)).decode()}".encode()
    await answer(send, body, status=404 if scope["path"] == "/missing" else 200, headers=[(b"x-name", b"value")])


async def send_head_only(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await asyncio.sleep(60)


def new_pool() -> HTTPConnectionPool:
    return HTTPConnectionPool(connect_timeout_s=5.0, idle_timeout_s=5.0)


def url_of(server: HTTPServer) -> str:
    assert server._listener is not None
    return f"http://127.0.0.1:{server._listener.sockets[0].getsockname()[1]}"


def test_fetch_returns_status_headers_and_body() -> None:
    async def work(client: Any, server: HTTPServer) -> None:
        with closing(new_pool()) as pool:
            reply = await pool.fetch("POST", f"{url_of(server)}/a?b=c", {"x": "y"}, b"hello")
            assert (reply.status, reply.body) == (200, b"POST /a?b=c hello")
            assert reply.headers["x-name"] == "value"
            assert (await pool.fetch("GET", url_of(server), {})).body == b"GET /? "
            assert (await pool.fetch("GET", f"{url_of(server)}/missing", {})).status == 404
            assert len(server.state.connections) == 1, "the connection is reused"

    run(describe_request, work)


def test_fetch_is_limited_in_time_and_size() -> None:
    async def work(client: Any, server: HTTPServer) -> None:
        with closing(new_pool()) as pool, pytest.raises(UpstreamTimeout):
            await pool.fetch("GET", url_of(server), {}, timeout_s=0.1)

    run(send_head_only, work)

    async def fetch_too_large(client: Any, server: HTTPServer) -> None:
        with closing(new_pool()) as pool, pytest.raises(UpstreamBroken):
            await pool.fetch("GET", url_of(server), {}, max_bytes=3)

    run(describe_request, fetch_too_large)


def test_fetch_from_closed_port() -> None:
    async def fetch() -> FetchedReply:
        with closing(new_pool()) as pool:
            return await pool.fetch("GET", "http://127.0.0.1:1/", {})

    with pytest.raises(UpstreamUnreachable):
        asyncio.run(fetch())
