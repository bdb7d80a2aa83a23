"""Of two servers that were given the same port, the second says so, however close together they start."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from emberline.core.errors import InvalidRequest
from emberline.server.listener import answer_while_loading, bind_listener, limit_silence, serve_until_stopped


def test_bound_port_is_in_use_at_once() -> None:
    """Two sockets with SO_REUSEADDR could both bind while neither listens: the second failed only after loading."""
    first = bind_listener("127.0.0.1", 0)
    with pytest.raises(InvalidRequest, match=r"another process is listening on this port.*choose another --port"):
        bind_listener("127.0.0.1", first.getsockname()[1])
    first.close()


def test_address_of_another_machine_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"Cannot assign.*--host must be an address of this machine"):
        bind_listener("192.0.2.1", 0)  # reserved for documentation


@pytest.mark.parametrize(("address", "option"), [(("127.0.0.1", 99_999), "port"), (("192.0.2.1", 0), "host")])
def test_hint_names_the_option_of_this_address(address: tuple[str, int], option: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bind_listener(*address, option_prefix="--metrics-")
    assert f"--metrics-{option}" in (caught.value.hint or "")


def test_503_while_loading_then_served() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def main() -> None:
        listener = bind_listener("127.0.0.1", 0)
        port = listener.getsockname()[1]
        early = await asyncio.open_connection("127.0.0.1", port)  # before anything takes connections: it waits
        server = await answer_while_loading(listener)
        body = b'{"model": "m", "messages": []}'
        status, headers, told = await ask(early, "/v1/chat/completions", body)
        assert status == 503 and b"retry-after" in headers and json.loads(told)["error"]["code"] == "loading"
        later = await asyncio.open_connection("127.0.0.1", port)
        assert (await ask(later, "/v1/messages", body))[0] == 503
        assert (await ask(later, "/health/ready"))[0] == 503
        assert (await ask(later, "/health"))[2] == b'{"status":"loading"}'
        assert (await ask(later, "/health/live"))[0] == 200
        ready = asyncio.Event()
        listening = asyncio.create_task(serve_until_stopped(app, listener, ready.set, server=server))
        await ready.wait()
        for connection in (later, await asyncio.open_connection("127.0.0.1", port)):
            status, _, told = await ask(connection, "/v1/models")
            assert (status, told) == (200, b"ok")
            connection[1].close()
        early[1].close()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(listening, 20)

    with restore_sigterm():
        asyncio.run(main())


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask(connection: Streams, path: str, body: bytes | None = None) -> tuple[int, dict[bytes, bytes], bytes]:
    """The reply's status, headers and body."""
    reader, writer = connection
    head = f"POST {path} HTTP/1.1\r\ncontent-length: {len(body)}" if body is not None else f"GET {path} HTTP/1.1"
    writer.write(f"{head}\r\nhost: localhost\r\n\r\n".encode() + (body or b""))
    async with asyncio.timeout(20):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines if line)
        return int(first.split()[1]), headers, await reader.readexactly(int(headers[b"content-length"]))


@contextmanager
def restore_sigterm() -> Iterator[None]:
    old = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def test_stop_logs_open_requests_and_timeout(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "emberline.server")

    async def main() -> None:
        begun, end = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await end.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

        async def leaving() -> None:
            end.set()

        listener = bind_listener("127.0.0.1", 0)
        port = listener.getsockname()[1]
        ready = asyncio.Event()
        listening = asyncio.create_task(serve_until_stopped(app, listener, ready.set, leaving))
        await ready.wait()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await begun.wait()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(listening, 20)
        writer.close()

    with restore_sigterm():
        asyncio.run(main())
    assert "Stopping, waiting for open requests: open=1 timeout_s=10" in caplog.text


def test_connections_to_unreachable_machines_are_closed() -> None:
    """Accepted connections inherit the limits of the listening socket."""
    with bind_listener("127.0.0.1", 0) as listener:
        limit_silence(listener, 120)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                found = [
                    accepted.getsockopt(socket.IPPROTO_TCP, name)
                    for name in (
                        socket.TCP_KEEPIDLE,
                        socket.TCP_KEEPINTVL,
                        socket.TCP_KEEPCNT,
                        socket.TCP_USER_TIMEOUT,
                    )
                ]
                assert found == [60, 15, 4, 120_000] and accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
