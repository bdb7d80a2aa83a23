"""Connections to workers: replies as they come, whole or broken, wherever they are cut; kept for the next request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from emberline.net.client_connection import MAX_BUFFERED_BYTES
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker_client import UpstreamBroken, UpstreamUnreachable, WorkerClient

GET = UpstreamRequest("GET", "/x", {"a": "b"}, b"")
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nX-One: 1\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 429 Full\r\ncontent-length: 3\r\n\r\nabc"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabc"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[str]:
    served = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{served.sockets[0].getsockname()[1]}"
    finally:
        served.close()


def reply_with(*pieces: bytes, close: bool = True) -> Talk:
    """The same to each request."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    return talk


async def fetch(url: str, upstream: WorkerClient, call: UpstreamRequest = GET) -> tuple[int, bytes]:
    reply = await upstream.request(url, call)
    try:
        return reply.status, await reply.read_all()
    finally:
        reply.close()


@pytest.mark.parametrize("text", [CHUNKED, SIZED, UNTIL_CLOSED, CONTINUED])
def test_reply_cut_at_every_byte(text: bytes) -> None:
    """Of what is sent, in two; and of what is sent at all: whole, or broken, never a shorter reply."""
    body = b"abcdefg" if text is CHUNKED else b"abc"

    async def run() -> None:
        async with WorkerClient() as upstream:
            for cut in range(1, len(text)):
                async with server(reply_with(text[:cut], text[cut:])) as url:
                    assert (await fetch(url, upstream))[1] == body
                async with server(reply_with(text[:cut])) as url:
                    try:
                        got = (await fetch(url, upstream))[1]
                        assert text is UNTIL_CLOSED and body.startswith(got)
                    except UpstreamBroken:
                        assert text is not UNTIL_CLOSED or cut < len(text) - 3

    asyncio.run(run())


def test_connections_are_reused_when_possible() -> None:
    async def run() -> None:
        connections = 0

        async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await reply_with(CHUNKED, close=False)(reader, writer)

        async with WorkerClient() as upstream, server(counted) as url:
            for _ in range(3):
                assert await fetch(url, upstream) == (200, b"abcdefg")
            assert connections == 1
            reply = await upstream.request(url, GET)
            other = await upstream.request(url, GET)
            assert connections == 2 and await reply.read_all() == await other.read_all()
            reply.close()
            other.close()
            left = await upstream.request(url, GET)
            left.abort("enough")  # all of it may have come already
            left.close()
            assert await fetch(url, upstream) == (200, b"abcdefg")

    asyncio.run(run())


def test_idle_connections_of_gone_worker_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberline.router.worker_client.IDLE_TIMEOUT_S", 0.0)

    async def run() -> None:
        closed = asyncio.Event()

        async def kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reply_with(SIZED, close=False)(reader, writer)
            closed.set()

        async with WorkerClient() as upstream, server(kept) as gone, server(reply_with(SIZED)) as other:
            await fetch(gone, upstream)
            await fetch(other, upstream)  # its place is new: others are looked at
            await asyncio.wait_for(closed.wait(), 5)

    asyncio.run(run())


def test_unread_reply_closes_and_abort_breaks_connection() -> None:
    async def run() -> None:
        gone = asyncio.Event()

        async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(CHUNKED[: CHUNKED.index(b"4\r\n")])
            await reader.read()
            gone.set()
            writer.close()

        async with WorkerClient() as upstream, server(endless) as url:
            reply = await upstream.request(url, GET)
            assert await reply.read() == b"abc"
            reply.close()
            await asyncio.wait_for(gone.wait(), 5)
            reply = await upstream.request(url, GET)
            reading = asyncio.create_task(reply.read_all())
            await asyncio.sleep(0.01)
            reply.abort("cut off")
            with pytest.raises(UpstreamBroken, match="cut off"):
                await reading
            reply.close()

    asyncio.run(run())


def test_unreachable_and_invalid_servers() -> None:
    async def run() -> None:
        async with WorkerClient() as upstream:
            async with server(reply_with(b"")) as url:
                pass
            with pytest.raises(UpstreamUnreachable):
                await upstream.request(url, GET)
            for nonsense in (
                b"SSH-2.0-x\r\n\r\n",
                b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
                CHUNKED[:60] + b"zz\r\n",
            ):
                async with server(reply_with(nonsense)) as url:
                    with pytest.raises(UpstreamBroken):
                        await fetch(url, upstream)

    asyncio.run(run())


def test_slow_reader_stops_sender() -> None:
    async def run() -> None:
        sent, piece = 0, b"x" * 4096

        async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (4096 * 20_000))
            for _ in range(20_000):
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
            writer.close()

        async with WorkerClient() as upstream, server(flood) as url:
            reply = await upstream.request(url, GET)
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.05)
            assert MAX_BUFFERED_BYTES < sent < 4096 * 20_000
            assert len(await reply.read_all()) == 4096 * 20_000
            reply.close()

    asyncio.run(run())


def test_request_bytes() -> None:
    async def run() -> None:
        heard = bytearray()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.extend(await reader.readuntil(b"\r\n\r\n"))
            heard.extend(await reader.readexactly(len(body)))
            writer.write(SIZED)

        for body in (b"{}", b"x" * (MAX_BUFFERED_BYTES + 1)):
            heard.clear()
            async with WorkerClient() as upstream, server(listen) as url:
                assert await fetch(url, upstream, UpstreamRequest("POST", "/v1?a=%20b", {"x-odd": "\xe4"}, body)) == (
                    429,
                    b"abc",
                )
            head, _, rest = bytes(heard).partition(b"\r\n\r\n")
            host, length = url.removeprefix("http://").encode(), b"content-length: %d" % len(body)
            assert head.split(b"\r\n") == [b"POST /v1?a=%20b HTTP/1.1", b"host: " + host, b"x-odd: \xe4", length]
            assert rest == body

    asyncio.run(run())
