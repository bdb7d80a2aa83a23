"""Timeouts of the HTTP server for slow, idle and disconnected clients."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from raw_http import GET, POST, UPGRADE, all_left, answer, body_of, echo, run

from emberline.net import server_connection, websocket
from emberline.net.server import HTTPServer
from emberline.net.server_state import Receive, Send


def test_idle_connection_is_closed_but_not_during_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(server_connection, "KEEP_ALIVE_TIMEOUT_S", 0.1)

    async def slow(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.4)
        await echo(scope, receive, send)

    async def work(client: Any, server: HTTPServer) -> None:
        for beginning in (b"", GET[:10]):
            connection = await client()
            connection.send(beginning)
            assert await connection.rest() == b""
        connection = await client()
        connection.send(GET)
        assert (await connection.reply())[1] == b"/a b "
        assert await connection.rest() == b""
        assert not server.state.connections

    run(slow, work)


def test_application_sees_client_disconnect() -> None:
    received: list[str] = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await body_of(receive)
        received.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})  # the client has disconnected
        await send({"type": "http.response.body", "body": b"x"})

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(POST)
        await asyncio.sleep(0.05)
        connection.writer.transport.abort()
        while not received:
            await asyncio.sleep(0.01)

    run(app, work)
    assert received == ["http.disconnect"]


def test_backpressure_in_both_directions() -> None:
    piece, many = b"x" * 65_536, 1000
    num_sent = 0
    may = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        nonlocal num_sent
        await may.wait()
        size = len(await body_of(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(many):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            num_sent += 1
        await send({"type": "http.response.body", "body": b"%d" % size})

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (many * len(piece)))
        connection.send(piece * many)
        size, before = connection.writer.transport.get_write_buffer_size, -1
        while before != size():
            before = size()
            await asyncio.sleep(0.1)
        assert size() > many * len(piece) // 2, "the application has not read it"
        may.set()
        await connection.writer.drain()
        before = -1
        while before != num_sent or not num_sent:
            before = num_sent
            await asyncio.sleep(0.1)
        assert num_sent < many // 2
        got = b""
        while not got.endswith(b"\r\n0\r\n\r\n"):
            got = got[-100:] + await connection.reader.read(1 << 20)
        assert b"\r\n%x\r\n%d\r\n0\r\n" % (8, many * len(piece)) in got

    run(app, work)


@pytest.mark.parametrize("raw_request", [GET, GET.replace(b"Host: x", b"Connection: close")])
def test_client_that_never_reads_is_disconnected(monkeypatch: pytest.MonkeyPatch, raw_request: bytes) -> None:
    monkeypatch.setattr(server_connection, "KEEP_ALIVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(server_connection, "CLOSE_TIMEOUT_S", 0.05)

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await answer(send, b"x" * (32 << 20))  # more than the kernel buffers for a client that does not read

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.writer.transport.pause_reading()
        connection.send(raw_request)
        while not server.state.connections:
            await asyncio.sleep(0.01)
        await all_left(server)

    run(app, work)


@pytest.mark.parametrize("reads", [False, True])
def test_stalled_client_is_disconnected_and_slow_client_is_not(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    monkeypatch.setattr(server_connection, "WRITE_STALL_TIMEOUT_S", 0.3)
    body = b"x" * (8 << 20)  # more than the kernel buffers for a client that does not read

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await answer(send, body)

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        if not reads:
            connection.writer.transport.pause_reading()
        connection.send(GET * 3)
        while not server.state.connections:
            await asyncio.sleep(0.01)
        if not reads:
            await all_left(server)
            return
        got = 0
        for _ in range(10):  # longer than WRITE_STALL_TIMEOUT_S
            got += len(await connection.reader.readexactly(1 << 18))
            await asyncio.sleep(0.1)
        while got < 3 * len(body):
            got += len(data := await connection.reader.read(1 << 20))
            assert data, "the connection was closed"

    run(app, work)


@pytest.mark.parametrize(
    "raw_request",
    [
        UPGRADE.replace(b"GET /", b"GET /" + b"x" * 9000),
        UPGRADE.replace(b"Host: x", b"Host: x\r\ny: " + b"z" * 9000),
        UPGRADE.replace(b"Host: x", b"Host: x" + b"".join(b"\r\ny%d: z" % i for i in range(150))),
        UPGRADE.replace(b"Host: x", b"Host: x\r\nContent-Length: 5"),  # the body never arrives
        UPGRADE.replace(b"Host: x", b"Host: x\r\nTransfer-Encoding: chunked"),
    ],
)
def test_websocket_request_with_large_head_or_body_is_rejected(raw_request: bytes) -> None:
    async def work(client: Any, server: HTTPServer) -> None:
        server.state.max_message_bytes = 1 << 20
        connection = await client()
        connection.send(raw_request)
        assert (await connection.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert await connection.rest() == b""
        await all_left(server)

    run(echo, work)


def test_websocket_is_rejected_with_any_status() -> None:
    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "websocket.http.response.start", "status": 529, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"busy"})

    async def work(client: Any, server: HTTPServer) -> None:
        server.state.max_message_bytes = 1 << 20
        connection = await client()
        connection.send(UPGRADE)
        reply = await connection.rest()
        assert reply.startswith(b"HTTP/1.1 529 \r\n") and reply.endswith(b"\r\n\r\nbusy")

    run(app, work)


def test_websocket_client_that_never_reads_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(websocket, "PING_INTERVAL_S", 0.05)

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "bytes": b"x" * (32 << 20)})

    async def work(client: Any, server: HTTPServer) -> None:
        server.state.max_message_bytes = 1 << 20
        connection = await client()
        connection.send(UPGRADE)
        assert (await connection.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        connection.writer.transport.pause_reading()
        await all_left(server)

    run(app, work)


def test_large_websocket_message_is_sent_in_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_FRAGMENT_BYTES", 4)

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        large, small = {"type": "websocket.send", "text": "0123456789"}, {"type": "websocket.send", "bytes": b"ab"}
        await asyncio.gather(send(large), send(small))

    async def work(client: Any, server: HTTPServer) -> None:
        server.state.max_message_bytes = 1 << 20
        connection = await client()
        connection.send(UPGRADE)
        await connection.reader.readuntil(b"\r\n\r\n")
        frames = [await connection.reader.readexactly(size) for size in (6, 6, 4, 4)]
        assert frames == [b"\x01\x040123", b"\x00\x044567", b"\x80\x0289", b"\x82\x02ab"]

    run(app, work)


def test_websocket_is_closed_after_cancelled_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_FRAGMENT_BYTES", 4)

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        sending = asyncio.ensure_future(send({"type": "websocket.send", "bytes": b"0123456789"}))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    async def work(client: Any, server: HTTPServer) -> None:
        server.state.max_message_bytes = 1 << 20
        connection = await client()
        connection.send(UPGRADE)
        await connection.reader.readuntil(b"\r\n\r\n")
        assert await connection.reader.readexactly(6) == b"\x02\x040123"
        assert (await connection.reader.readexactly(4))[0] == 0x88, (
            "no message follows: the rest of this one is missing"
        )

    run(app, work)
