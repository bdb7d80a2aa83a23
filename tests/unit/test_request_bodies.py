"""Request bodies of the HTTP server: their share of the memory, their deadline, and bodies that nothing reads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from raw_http import UPGRADE, Client, all_left, answer, run

from emberline.core.errors import BodyMemoryFull, EmberlineError
from emberline.net import request_response_cycle, server_connection, websocket
from emberline.net.body_budget import BodyBudget
from emberline.net.server import HTTPServer
from emberline.net.server_state import Receive, Send
from emberline.server.access import AccessPolicy, has_key
from emberline.server.exchange import Exchange
from emberline.server.route_table import reply_error

SIZE = 100_000


def head(key: str, size: int = SIZE, extra: str = "") -> bytes:
    return f"POST / HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\ncontent-length: {size}\r\n{extra}\r\n".encode()


async def read_and_answer(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    exchange = Exchange(scope, receive, send)
    try:
        if has_key(exchange):
            AccessPolicy(api_keys=("a", "b")).check(exchange, "key")
        body = await exchange.read_body(1 << 20)
    except EmberlineError as e:
        await reply_error(exchange, e)
    else:
        await answer(send, b"%d" % len(body))


def test_client_alone_may_use_half_of_the_memory() -> None:
    budget = BodyBudget(1000)
    for _ in range(5):
        budget.reserve(b"a", 100)
    with pytest.raises(BodyMemoryFull) as own:
        budget.reserve(b"a", 100)
    budget.reserve(b"b", 100)  # another client still finds room
    budget.reserve(b"c", 100)
    with pytest.raises(BodyMemoryFull) as others:
        budget.reserve(b"d", 200)
    assert (own.value.status, others.value.status) == (429, 503)
    assert budget.rejected_bodies == 2 and budget.used_bytes == 700


def test_one_body_larger_than_the_memory_is_accepted() -> None:
    budget = BodyBudget(1000)
    budget.reserve(b"a", 5000)
    budget.release(b"a", 5000)
    assert budget.used_bytes == 0


def test_memory_fits_the_machine() -> None:
    small, large = BodyBudget(), BodyBudget()
    small.fit_to_memory(1 << 30)
    large.fit_to_memory(1 << 40)
    for budget, allowed in ((small, 128 << 20), (large, 256 << 20)):
        budget.reserve(b"a", allowed)
        with pytest.raises(BodyMemoryFull):
            budget.reserve(b"a", 1)


def test_unfinished_bodies_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BodyBudget(5 * SIZE)
    monkeypatch.setattr(server_connection, "body_budget", budget)

    async def begin(client: Client, key: str) -> None:
        """Send a body but for its last byte, and wait until the server has reserved memory for it."""
        before = budget.used_bytes
        client.send(head(key) + b"x" * (SIZE - 1))
        while budget.used_bytes == before:
            await asyncio.sleep(0.01)

    async def work(client: Any, server: HTTPServer) -> None:
        first, second, third, other = [await client() for _ in range(4)]
        await begin(first, "a")
        await begin(second, "a")
        extra = "x-api-key: a\r\nExpect: 100-continue\r\n"
        third.send(head("not-the-key-that-counts", extra=extra))  # unchecked headers give it no share of its own
        reply, body = await third.reply()
        assert reply.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in reply and b"body_share_full" in body
        await begin(other, "b")
        for each in (first, other):
            each.send(b"x")
            assert (await each.reply())[1] == b"%d" % SIZE
        assert budget.used_bytes == SIZE
        second.writer.close()  # a client that leaves gives its memory back
        while budget.used_bytes:
            await asyncio.sleep(0.01)

    run(read_and_answer, work)


def test_chunked_body_is_counted_as_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BodyBudget(3 * SIZE)
    budget.reserve(b"another client", SIZE)
    monkeypatch.setattr(server_connection, "body_budget", budget)

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.send((b"%x\r\n" % SIZE + b"x" * SIZE + b"\r\n") * 4)
        assert (await connection.reply())[0].startswith(b"HTTP/1.1 503 ")
        assert budget.used_bytes == SIZE

    run(read_and_answer, work)


def test_memory_of_a_body_is_free_once_the_reply_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BodyBudget(3 * SIZE)
    monkeypatch.setattr(server_connection, "body_budget", budget)
    used: list[int] = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.read_body(1 << 20)
        used.append(budget.used_bytes)
        await exchange.start_event_stream()
        used.append(budget.used_bytes)
        await exchange.send(b"", last=True)

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(head("a") + b"x" * SIZE)
        await connection.reader.readuntil(b"\r\n\r\n")

    run(app, work)
    assert used == [SIZE, 0]


@pytest.mark.parametrize("sent", [b"", b"x"])
def test_slow_body_is_answered_408(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(request_response_cycle, "BODY_TIMEOUT_S", 0.2)

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(head("a", 5) + sent)
        reply, body = await connection.reply()
        assert reply.startswith(b"HTTP/1.1 408 ") and b"connection: close" in reply
        assert b"the request's body arrived too slowly: %d bytes" % len(sent) in body
        assert await connection.rest() == b""
        await all_left(server)

    run(read_and_answer, work)


def test_body_that_arrives_fast_enough_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body takes longer than BODY_TIMEOUT_S, but its bytes arrive faster than the lowest rate."""
    monkeypatch.setattr(request_response_cycle, "BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(request_response_cycle, "MIN_BODY_BYTES_PER_S", 1)

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(head("a", 3000) + b"x" * 1000)
        for _ in range(2):
            await asyncio.sleep(0.15)
            connection.send(b"x" * 1000)
        assert (await connection.reply())[1] == b"3000"

    run(read_and_answer, work)


def test_body_after_its_reply_is_discarded_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "MAX_DISCARDED_BODY_BYTES", 2 * SIZE)

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await answer(send, b"no", 401)

    async def work(client: Any, server: HTTPServer) -> None:
        connection = await client()
        connection.send(head("a") + b"x" * SIZE + head("a"))  # below the limit: the connection stays usable
        for _ in range(2):
            assert (await connection.reply())[0].startswith(b"HTTP/1.1 401 ")
        endless = await client()
        endless.send(head("a", 1 << 30))
        assert (await endless.reply())[0].startswith(b"HTTP/1.1 401 ")
        endless.send(b"x" * 4 * SIZE)
        connection.writer.close()
        await all_left(server)

    run(app, work)


def masked_frame(opcode: int, payload: bytes) -> bytes:
    return bytes([0x80 | opcode, 0x80 | 127]) + len(payload).to_bytes(8, "big") + b"\0\0\0\0" + payload


def test_websocket_is_read_only_after_it_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller whose key is not checked yet cannot fill memory with a message."""
    budget = BodyBudget(1000 * SIZE)
    monkeypatch.setattr(websocket, "body_budget", budget)
    was_checked = asyncio.Event()
    received: list[int] = []

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        await was_checked.wait()
        await send({"type": "websocket.accept"})
        received.append(len((await receive())["bytes"]))

    async def work(client: Any, server: HTTPServer) -> None:
        server.state.max_message_bytes = 100 * SIZE
        connection = await client()
        connection.send(UPGRADE)
        while not server.state.tasks:
            await asyncio.sleep(0.01)
        (protocol,) = server.state.connections
        size = 80 * SIZE
        connection.send(masked_frame(2, b"x" * size))
        with pytest.raises(TimeoutError):  # the socket's buffers are full, and the server does not read
            await asyncio.wait_for(connection.writer.drain(), 0.2)
        assert not protocol._transport.is_reading()  # type: ignore[attr-defined]
        was_checked.set()
        await connection.reader.readuntil(b"\r\n\r\n")
        while not received:
            await asyncio.sleep(0.01)
        assert received == [size]

    run(app, work)
    assert budget.used_bytes == 0


def test_websocket_message_without_memory_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BodyBudget(3 * SIZE)
    budget.reserve(b"another client", SIZE)
    monkeypatch.setattr(websocket, "body_budget", budget)

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        assert (await receive())["type"] == "websocket.disconnect"

    async def work(client: Any, server: HTTPServer) -> None:
        server.state.max_message_bytes = 100 * SIZE
        connection = await client()
        connection.send(UPGRADE)
        await connection.reader.readuntil(b"\r\n\r\n")
        connection.send(masked_frame(2, b"x" * 5 * SIZE))
        frame = await connection.reader.readexactly(4)
        assert frame[0] == 0x88 and int.from_bytes(frame[2:], "big") == 1013
        connection.writer.close()
        await all_left(server)

    run(app, work)
    assert budget.used_bytes == SIZE
