"""The server against clients that write their bytes themselves: requests in every cut, one after the other and all at
once, what is too large or too slow, who leaves, and what is under way when it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from emberline.net import visitor, websocket
from emberline.net.host import App, Receive, Send
from emberline.net.server import Server
from emberline.net.turn import CutOff

GET = b"GET /a%20b?c=%20d HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\ncontent-length: 5\r\n\r\nhello"
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
CHUNKED = b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self) -> tuple[bytes, bytes]:
        """Head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next((int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), 0)
        return head, await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        return await self.reader.read()


def run(app: App, work: Callable[[Callable[[], Awaitable[Client]], Server], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            server = Server(app, proxied=True)
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            await server.start(listener)
            port = listener.getsockname()[1]

            async def client() -> Client:
                return Client(*await asyncio.open_connection("127.0.0.1", port))

            try:
                await work(client, server)
            finally:
                await server.stop(0.0)

    asyncio.run(main())


async def body_of(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        assert message["type"] == "http.request", message
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts)


async def answer(send: Send, body: bytes, status: int = 200, headers: Any = ()) -> None:
    sized = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [sized, *headers]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    await answer(send, b"%b %b" % (scope["path"].encode(), await body_of(receive)))


@pytest.mark.parametrize("asked", [POST, CHUNKED])
def test_every_cut_on_one_connection(asked: bytes) -> None:
    async def work(client: Any, server: Server) -> None:
        one = await client()
        for cut in range(1, len(asked)):
            one.say(asked[:cut])
            await asyncio.sleep(0)
            one.say(asked[cut:])
            assert await one.reply() == (b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n", b"/x hello")

    run(echo, work)


def test_what_comes_at_once_is_answered_one_after_the_other() -> None:
    running = 0

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.01)
        running -= 1  # the next may begin as soon as this one's reply is whole
        await echo(scope, receive, send)

    async def work(client: Any, server: Server) -> None:
        one = await client()
        one.say(b"".join(POST.replace(b"/x", b"/%d" % i) for i in range(5)))
        assert [(await one.reply())[1] for _ in range(5)] == [b"/%d hello" % i for i in range(5)]
        one.say(GET)
        assert (await one.reply())[1] == b"/a b "

    run(app, work)


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (b"SSH-2.0-x\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", b"400"),
        (b"GET x:y:z HTTP/1.1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * visitor.LARGEST_HEAD + b"y\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 4 * visitor.LARGEST_HEAD, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 300 + b"\r\n", b"431"),
    ],
)
def test_what_is_no_request_is_refused(asked: bytes, status: bytes) -> None:
    async def nobody(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        raise AssertionError("it was no request")

    async def work(client: Any, server: Server) -> None:
        one = await client()
        one.say(asked)
        assert (await one.reply())[0].startswith(b"HTTP/1.1 " + status)

    run(nobody, work)


def test_a_body_that_breaks_is_told_to_the_client_and_to_who_reads_it() -> None:
    seen = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request":
            seen.append(message["body"])
        seen.append(b"gone")

    async def work(client: Any, server: Server) -> None:
        one = await client()
        one.say(CHUNKED[: CHUNKED.index(b"3\r\n")])
        await asyncio.sleep(0.05)
        one.say(b"zz\r\n")
        assert (await one.reply())[0].startswith(b"HTTP/1.1 400 ")
        assert await one.rest() == b"" and seen == [b"he", b"gone"]

    run(app, work)


def test_trailers_are_no_headers() -> None:
    seen = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await body_of(receive)
        seen.append(dict(scope["headers"]))
        await answer(send, b"")

    async def work(client: Any, server: Server) -> None:
        one = await client()
        trailed = CHUNKED.removesuffix(b"\r\n") + b"authorization: me\r\nx: y\r\n\r\n"
        for asked in (trailed, POST):
            one.say(asked)
            await one.reply()

    run(app, work)
    assert seen == [{b"transfer-encoding": b"chunked"}, {b"content-length": b"5"}]


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"0\r\n" + b"x: y\r\n" * 9000, b"1;x="])
def test_a_body_whose_frame_is_endless_is_refused(endless: bytes) -> None:
    async def work(client: Any, server: Server) -> None:
        one = await client()
        one.say(CHUNKED.removesuffix(b"0\r\n\r\n"))
        await asyncio.sleep(0.05)
        one.say(endless + b"a" * 2 * visitor.LARGEST_HEAD)
        assert (await one.reply())[0].startswith(b"HTTP/1.1 431 ")
        await _all_left(server)

    run(echo, work)


def test_large_pieces_of_a_body_are_no_frame() -> None:
    async def work(client: Any, server: Server) -> None:
        one = await client()
        body = b"x" * (1 << 20)
        for _ in range(2):
            one.say(b"POST /x HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        for _ in range(2):
            assert len((await one.reply())[1]) == len(body) + 3

    run(echo, work)


def test_who_says_nothing_is_sent_away_and_who_waits_for_a_reply_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitor, "HEAD", 0.1)
    monkeypatch.setattr(visitor, "KEEP", 0.1)

    async def slow(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.4)
        await echo(scope, receive, send)

    async def work(client: Any, server: Server) -> None:
        for beginning in (b"", GET[:10]):
            one = await client()
            one.say(beginning)
            assert await one.rest() == b""
        one = await client()
        one.say(GET)
        assert (await one.reply())[1] == b"/a b "
        assert await one.rest() == b""
        assert not server.host.guests

    run(slow, work)


def test_a_body_is_asked_for_when_somebody_reads_it() -> None:
    wanted = True

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await (echo(scope, receive, send) if wanted else answer(send, b"no", 401))

    async def work(client: Any, server: Server) -> None:
        nonlocal wanted
        head, body = POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n").split(b"\r\n\r\n")
        one = await client()
        one.say(head + b"\r\n\r\n")
        assert await one.reply() == (b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        one.say(body)
        assert (await one.reply())[1] == b"/x hello"
        wanted = False
        one.say(head + b"\r\n\r\n")
        assert (await one.reply())[0].startswith(b"HTTP/1.1 401 ")

    run(app, work)


def test_who_leaves_is_told_of() -> None:
    heard: list[str] = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await body_of(receive)
        heard.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})  # to nobody
        await send({"type": "http.response.body", "body": b"x"})

    async def work(client: Any, server: Server) -> None:
        one = await client()
        one.say(POST)
        await asyncio.sleep(0.05)
        one.writer.transport.abort()
        while not heard:
            await asyncio.sleep(0.01)

    run(app, work)
    assert heard == ["http.disconnect"]


def test_who_takes_slowly_is_given_slowly_and_who_reads_slowly_is_sent_slowly() -> None:
    piece, many = b"x" * 65_536, 1000
    given = 0
    may = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        nonlocal given
        await may.wait()
        size = len(await body_of(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(many):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            given += 1
        await send({"type": "http.response.body", "body": b"%d" % size})

    async def work(client: Any, server: Server) -> None:
        one = await client()
        one.say(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (many * len(piece)))
        one.say(piece * many)
        size, before = one.writer.transport.get_write_buffer_size, -1
        while before != size():
            before = size()
            await asyncio.sleep(0.1)
        assert size() > many * len(piece) // 2, "nobody has read it"
        may.set()
        await one.writer.drain()
        before = -1
        while before != given or not given:
            before = given
            await asyncio.sleep(0.1)
        assert given < many // 2
        got = b""
        while not got.endswith(b"\r\n0\r\n\r\n"):
            got = got[-100:] + await one.reader.read(1 << 20)
        assert b"\r\n%x\r\n%d\r\n0\r\n" % (8, many * len(piece)) in got

    run(app, work)


async def _all_left(server: Server) -> None:
    async with asyncio.timeout(10):
        while server.host.guests:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("asked", [GET, GET.replace(b"Host: x", b"Connection: close")])
def test_who_never_takes_its_reply_is_sent_away(monkeypatch: pytest.MonkeyPatch, asked: bytes) -> None:
    monkeypatch.setattr(visitor, "KEEP", 0.05)
    monkeypatch.setattr(visitor, "LINGER", 0.05)

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await answer(send, b"x" * (32 << 20))  # more than systems keep for one who does not read

    async def work(client: Any, server: Server) -> None:
        one = await client()
        one.writer.transport.pause_reading()
        one.say(asked)
        while not server.host.guests:
            await asyncio.sleep(0.01)
        await _all_left(server)

    run(app, work)


@pytest.mark.parametrize("reads", [False, True])
def test_who_takes_nothing_of_many_replies_is_sent_away_and_who_is_slow_is_not(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(visitor, "STALLED", 0.3)
    body = b"x" * (8 << 20)  # more than systems keep for one who does not read

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await answer(send, body)

    async def work(client: Any, server: Server) -> None:
        one = await client()
        if not reads:
            one.writer.transport.pause_reading()
        one.say(GET * 3)
        while not server.host.guests:
            await asyncio.sleep(0.01)
        if not reads:
            await _all_left(server)
            return
        got = 0
        for _ in range(10):  # for longer than nothing may be taken
            got += len(await one.reader.readexactly(1 << 18))
            await asyncio.sleep(0.1)
        while got < 3 * len(body):
            got += len(data := await one.reader.read(1 << 20))
            assert data, "it was cut"

    run(app, work)


@pytest.mark.parametrize(
    "asked",
    [
        UPGRADE.replace(b"GET /", b"GET /" + b"x" * 9000),
        UPGRADE.replace(b"Host: x", b"Host: x\r\ny: " + b"z" * 9000),
        UPGRADE.replace(b"Host: x", b"Host: x" + b"\r\ny: z" * 150),
        UPGRADE.replace(b"Host: x", b"Content-Length: 5"),  # which never comes
        UPGRADE.replace(b"Host: x", b"Transfer-Encoding: chunked"),
    ],
)
def test_a_sockets_head_that_is_too_large_or_has_a_body_is_refused(asked: bytes) -> None:
    async def work(client: Any, server: Server) -> None:
        server.host.largest_message = 1 << 20
        one = await client()
        one.say(asked)
        assert (await one.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert await one.rest() == b""
        await _all_left(server)

    run(echo, work)


def test_a_socket_is_refused_with_any_number() -> None:
    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "websocket.http.response.start", "status": 529, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"busy"})

    async def work(client: Any, server: Server) -> None:
        server.host.largest_message = 1 << 20
        one = await client()
        one.say(UPGRADE)
        said = await one.rest()
        assert said.startswith(b"HTTP/1.1 529 \r\n") and said.endswith(b"\r\n\r\nbusy")

    run(app, work)


def test_who_never_takes_a_sockets_messages_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "GOODBYE", 0.05)

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "bytes": b"x" * (32 << 20)})

    async def work(client: Any, server: Server) -> None:
        server.host.largest_message = 1 << 20
        one = await client()
        one.say(UPGRADE)
        assert (await one.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        one.writer.transport.pause_reading()
        await _all_left(server)

    run(app, work)


def test_how_replies_are_framed() -> None:
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

    async def work(client: Any, server: Server) -> None:
        for asked, expected in {
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
            one = await client()
            one.say(asked + b"\r\nconnection: close\r\n\r\n")
            assert await one.rest() == expected, asked

    run(app, work)


def test_a_reply_of_one_piece_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = visitor.Visitor.write
    monkeypatch.setattr(visitor.Visitor, "write", lambda self, data: (written.append(data), write(self, data)))

    async def work(client: Any, server: Server) -> None:
        one = await client()
        one.say(POST)
        head, body = await one.reply()
        assert written == [head + body]

    run(echo, work)


def test_an_application_that_fails() -> None:
    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["path"] == "/smuggled":
            await answer(send, b"", headers=[(b"x", b"y\r\nz: 1")])
        if scope["path"] in ("/late", "/short"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        if scope["path"] == "/late":
            raise CutOff
        if scope["path"] == "/early":
            raise ZeroDivisionError

    async def work(client: Any, server: Server) -> None:
        for path, status, whole in (
            ("/early", b"500", True),
            ("/nothing", b"500", True),
            ("/smuggled", b"500", True),
            ("/late", b"200", False),
            ("/short", b"200", False),
        ):
            one = await client()
            one.say(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            said = await one.rest()
            assert said.startswith(b"HTTP/1.1 " + status), said
            assert whole or not said.endswith(b"0\r\n\r\n")

    run(app, work)


def test_what_is_under_way_is_ended_when_it_stops() -> None:
    begun, stopped = asyncio.Event(), []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        begun.set()
        try:
            await asyncio.sleep(60 if scope["path"] == "/long" else 0.2)
        except asyncio.CancelledError:
            stopped.append(scope["path"])
            raise
        await echo(scope, receive, send)

    async def work(client: Any, server: Server) -> None:
        idle, busy, long = await client(), await client(), await client()
        long.say(GET.replace(b"/a%20b", b"/long"))
        busy.say(GET)
        await begun.wait()
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(server.stop(1.5))
        assert await idle.rest() == b""
        with pytest.raises(OSError):
            await client()
        head, said = await busy.reply()
        assert b"connection: close" in head and said == b"/a b " and await busy.rest() == b""
        assert await long.rest() == b"" and stopped == ["/long"]
        await stopping
        assert not server.host.guests and not server.host.work

    run(app, work)


def test_a_proxy_on_this_machine_is_believed() -> None:
    seen = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        seen.append(scope["client"][0])
        await answer(send, b"")

    async def work(client: Any, server: Server) -> None:
        one = await client()
        for said in (b"", b"x-forwarded-for: 9.9.9.9, 8.8.8.8, 127.0.0.1\r\n", b"x-forwarded-for: 127.0.0.1\r\n"):
            one.say(b"GET / HTTP/1.1\r\n%b\r\n" % said)
            await one.reply()
        server.host.proxied = False
        one.say(b"GET / HTTP/1.1\r\nx-forwarded-for: 9.9.9.9\r\n\r\n")
        await one.reply()

    run(app, work)
    assert seen == ["127.0.0.1", "8.8.8.8", "127.0.0.1", "127.0.0.1"]
