"""The HTTP server with clients that send raw bytes: split and pipelined requests, limits, framing and shutdown."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from raw_http import CHUNKED, GET, POST, UPGRADE, all_left, answer, body_of, echo, run

from emberline.net import server_connection
from emberline.net.request_response_cycle import ReplyInterrupted, RequestResponseCycle
from emberline.net.server import HTTPServer
from emberline.net.server_state import Receive, Send


@pytest.mark.parametrize("raw_request", [POST, CHUNKED])
def test_request_split_at_every_byte(raw_request: bytes) -> None:
    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        for cut in range(1, len(raw_request)):
            connection.send(raw_request[:cut])
            await asyncio.sleep(0)
            connection.send(raw_request[cut:])
            assert await connection.reply() == (b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n", b"/x hello")

    run(echo, work)


def test_pipelined_requests_are_answered_in_order() -> None:
    running = 0

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.01)
        running -= 1  # the next request may start once this reply is complete
        await echo(scope, receive, send)

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(b"".join(POST.replace(b"/x", b"/%d" % i) for i in range(5)))
        assert [(await connection.reply())[1] for _ in range(5)] == [b"/%d hello" % i for i in range(5)]
        connection.send(GET)
        assert (await connection.reply())[1] == b"/a b "

    run(app, work)


@pytest.mark.parametrize(
    ("raw_request", "status"),
    [
        (b"SSH-2.0-x\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nHost: x\r\n\r\n", b"400"),
        (UPGRADE.replace(b"Host: x\r\n", b"Host: x\r\nHost: y\r\n"), b"400"),
        (b"GET x:y:z HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: identity\r\ntransfer-encoding: identity\r\n\r\n", b"501"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n", b"501"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nAuthorization: a\r\nauthorization: b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx-emberline-tenant: a\r\nX-Emberline-Tenant: b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * server_connection.MAX_HEAD_BYTES + b"y\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 4 * server_connection.MAX_HEAD_BYTES, b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 300 + b"\r\n", b"431"),
    ],
)
def test_invalid_request_is_rejected(raw_request: bytes, status: bytes) -> None:
    async def unreachable_app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        raise AssertionError("the request must not reach the application")

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(raw_request)
        assert (await connection.reply())[0].startswith(b"HTTP/1.1 " + status)

    run(unreachable_app, work)


def test_repeated_headers_are_joined() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        seen.append(scope["headers"])
        await answer(send, b"")

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(b"GET / HTTP/1.1\r\nhost: x\r\nbeta: a\r\ncookie: a=1\r\nBeta: b\r\ncookie: b=2\r\n\r\n")
        await connection.reply()

    run(app, work)
    assert seen == [[(b"host", b"x"), (b"beta", b"a, b"), (b"cookie", b"a=1; b=2")]]


def test_rejection_names_the_repeated_header() -> None:
    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(b"GET / HTTP/1.1\r\nhost: x\r\nx-api-key: a\r\nx-api-key: b\r\n\r\n")
        assert (await connection.reply())[1] == b"Bad Request: the header x-api-key is given more than once"

    run(echo, work)


def test_missing_memory_is_not_an_invalid_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(cycle: RequestResponseCycle, data: bytes) -> None:
        raise MemoryError

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await receive()

    async def work(client: Any, server: HTTPServer) -> None:
        monkeypatch.setattr(RequestResponseCycle, "add_request_body", fail)
        connection = await client()
        connection.send(POST)
        assert (await connection.reply())[0].startswith(b"HTTP/1.1 503 ")

    run(app, work)
    assert "memory is used up" in caplog.text


def test_invalid_body_is_reported_to_client_and_application() -> None:
    seen = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request":
            seen.append(message["body"])
        seen.append(b"gone")

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(CHUNKED[: CHUNKED.index(b"3\r\n")])
        await asyncio.sleep(0.05)
        connection.send(b"zz\r\n")
        assert (await connection.reply())[0].startswith(b"HTTP/1.1 400 ")
        assert await connection.rest() == b"" and seen == [b"he", b"gone"]

    run(app, work)


def test_trailers_are_not_headers() -> None:
    seen = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await body_of(receive)
        seen.append(dict(scope["headers"]))
        await answer(send, b"")

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        trailed = CHUNKED.removesuffix(b"\r\n") + b"authorization: me\r\nx: y\r\n\r\n"
        for raw_request in (trailed, POST):
            connection.send(raw_request)
            await connection.reply()

    run(app, work)
    assert seen == [{b"host": b"x", b"transfer-encoding": b"chunked"}, {b"host": b"x", b"content-length": b"5"}]


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"0\r\n" + b"x: y\r\n" * 9000, b"1;x="])
def test_endless_chunk_framing_is_rejected(endless: bytes) -> None:
    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(CHUNKED.removesuffix(b"0\r\n\r\n"))
        await asyncio.sleep(0.05)
        connection.send(endless + b"a" * 2 * server_connection.MAX_HEAD_BYTES)
        assert (await connection.reply())[0].startswith(b"HTTP/1.1 431 ")
        await all_left(server)

    run(echo, work)


def test_large_chunks_of_body_are_accepted() -> None:
    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        body = b"x" * (1 << 20)
        for _ in range(2):
            connection.send(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        for _ in range(2):
            assert len((await connection.reply())[1]) == len(body) + 3

    run(echo, work)


def test_continue_is_sent_when_body_is_read() -> None:
    is_accepted = True

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await (echo(scope, receive, send) if is_accepted else answer(send, b"no", 401))

    async def work(client: Any, server: HTTPServer) -> None:
        nonlocal is_accepted
        head, body = POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n").split(b"\r\n\r\n")
        connection = await client()
        connection.send(head + b"\r\n\r\n")
        assert await connection.reply() == (b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        connection.send(body)
        assert (await connection.reply())[1] == b"/x hello"
        is_accepted = False
        connection.send(head + b"\r\n\r\n")
        assert (await connection.reply())[0].startswith(b"HTTP/1.1 401 ")

    run(app, work)


def test_reply_framing() -> None:
    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["path"] == "/sized":
            await answer(send, b"hello")
        elif scope["path"] == "/none":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"he", b"", b"llo"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body"})

    async def work(client: Any, server: HTTPServer) -> None:
        for raw_request, expected in {
            b"GET /parts HTTP/1.1": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
            b"GET /parts HTTP/1.0": b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello",
            b"GET /sized HTTP/1.1": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello",
            b"HEAD /sized HTTP/1.1": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\n",
            b"HEAD /parts HTTP/1.1": b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n",
            b"GET /none HTTP/1.1": b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n",
            b"GET http://x/sized HTTP/1.1": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello",
            b"GET /sized HTTP/1.1\r\nupgrade: h2c": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\n"
            b"hello",
        }.items():
            connection = await client()
            connection.send(raw_request + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert await connection.rest() == expected, raw_request

    run(app, work)


def test_reply_of_one_part_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = server_connection.HTTPServerConnection.write
    monkeypatch.setattr(
        server_connection.HTTPServerConnection, "write", lambda self, data: (written.append(data), write(self, data))
    )

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(POST)
        head, body = await connection.reply()
        assert written == [head + body]

    run(echo, work)


def test_failing_application() -> None:
    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["path"] == "/smuggled":
            await answer(send, b"", headers=[(b"x", b"y\r\nz: 1")])
        if scope["path"] in ("/late", "/short"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        if scope["path"] == "/late":
            raise ReplyInterrupted
        if scope["path"] == "/early":
            raise ZeroDivisionError

    async def work(client: Any, server: HTTPServer) -> None:
        for path, status, whole in (
            ("/early", b"500", True),
            ("/nothing", b"500", True),
            ("/smuggled", b"500", True),
            ("/late", b"200", False),
            ("/short", b"200", False),
        ):
            connection = await client()
            connection.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            reply = await connection.rest()
            assert reply.startswith(b"HTTP/1.1 " + status), reply
            assert whole or not reply.endswith(b"0\r\n\r\n")

    run(app, work)


def test_stop_finishes_requests_in_progress() -> None:
    begun, stopped = asyncio.Event(), []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        begun.set()
        try:
            await asyncio.sleep(60 if scope["path"] == "/long" else 0.2)
        except asyncio.CancelledError:
            stopped.append(scope["path"])
            raise
        await echo(scope, receive, send)

    async def work(client: Any, server: HTTPServer) -> None:
        idle, busy, long = await client(), await client(), await client()
        long.send(GET.replace(b"/a%20b", b"/long"))
        busy.send(GET)
        await begun.wait()
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(server.stop(1.5))
        assert await idle.rest() == b""
        with pytest.raises(OSError):
            await client()
        head, reply = await busy.reply()
        assert b"connection: close" in head and reply == b"/a b " and await busy.rest() == b""
        assert await long.rest() == b"" and stopped == ["/long"]
        await stopping
        assert not server.state.connections and not server.state.tasks

    run(app, work)


def test_client_is_the_peer_of_the_connection() -> None:
    seen = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        seen.append(scope["client"][0])
        await answer(send, b"")

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(b"GET / HTTP/1.1\r\nhost: x\r\nx-forwarded-for: 9.9.9.9\r\n\r\n")
        await connection.reply()

    run(app, work)
    assert seen == ["127.0.0.1"]
