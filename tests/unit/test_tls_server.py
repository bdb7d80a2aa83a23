"""The HTTP server and the connection pool over TLS: refusals, rotation, plain HTTP, WebSockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import uvloop
from raw_http import UPGRADE

from emberline.bench.certificates import LocalCA
from emberline.core.gateway_config import GatewayConfig
from emberline.core.tls import TLSIdentity
from emberline.core.tls_config import TLSConfig
from emberline.gateway.http.main import make_engine_tls
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.net import server as net_server
from emberline.net.connection_pool import HTTPConnectionPool
from emberline.net.errors import UpstreamFailed
from emberline.net.server import HTTPServer
from emberline.net.server_state import App, Receive, Send
from emberline.server.listener import bind_listener

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> LocalCA:
    return LocalCA(tmp_path_factory.mktemp("ca"))


def config_of(ca: LocalCA, name: str, trusted: LocalCA | None = None, **more: Any) -> TLSConfig:
    files = ca.issue(name)
    return TLSConfig(str(files.cert), str(files.key), str((trusted or ca).file), **more)


def run(work: Callable[[], Coroutine[Any, Any, None]], loop: str = "uvloop") -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await work()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(limited())


async def echo(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    body = f"{scope['scheme']} {scope['client_cert_names']}".encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(identity: TLSIdentity, app: App = echo, **options: Any) -> AsyncIterator[int]:
    listener = bind_listener("127.0.0.1", 0)
    server = HTTPServer(app, tls=identity.listener_context(), **options)
    await server.start(listener)
    try:
        yield listener.getsockname()[1]
    finally:
        await server.stop(5.0)
        assert not server.state.connections


async def fetch(port: int, identity: TLSIdentity | None) -> str:
    context = identity.peer_client_context() if identity is not None else None
    with closing(HTTPConnectionPool(connect_timeout_s=5.0, idle_timeout_s=5.0, tls=context)) as pool:
        return (await pool.fetch("GET", f"https://localhost:{port}/", {}, timeout_s=5.0)).body.decode()


@pytest.mark.parametrize("loop", LOOPS)
def test_only_clients_with_a_certificate_of_the_ca_are_served(ca: LocalCA, tmp_path: Path, loop: str) -> None:
    other = LocalCA(tmp_path)
    server = TLSIdentity(config_of(ca, "server"))

    async def work() -> None:
        async with serving(server) as port:
            assert await fetch(port, TLSIdentity(config_of(ca, "client"))) == "https ('localhost', '127.0.0.1')"
            for refused in (
                TLSIdentity(config_of(other, "client", trusted=ca)),
                TLSIdentity(TLSConfig(None, None, str(ca.file))),
                TLSIdentity(config_of(ca, "client", peer_names=("another",))),
                None,  # it knows only the system's CAs
            ):
                with pytest.raises(UpstreamFailed):
                    await fetch(port, refused)
        assert server.failed_handshakes >= 2

    run(work, loop)


def test_expired_client_certificate_is_refused(ca: LocalCA) -> None:
    config = config_of(ca, "short", peer_names=())
    ca.issue("short", starts_in=timedelta(days=-2))
    expired = TLSIdentity(config, now=lambda: time.time() - 1.5 * 86400)  # its own clock is wrong

    async def work() -> None:
        async with serving(TLSIdentity(config_of(ca, "server"))) as port:
            with pytest.raises(UpstreamFailed):
                await fetch(port, expired)

    run(work)


def test_client_certificates_may_be_optional_but_never_wrong(ca: LocalCA, tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(TLSIdentity(config_of(ca, "server", client_certs="cluster"))) as port:
            assert await fetch(port, TLSIdentity(TLSConfig(None, None, str(ca.file)))) == "https None"
            with pytest.raises(UpstreamFailed):
                await fetch(port, TLSIdentity(config_of(LocalCA(tmp_path), "client", trusted=ca)))

    run(work)


def test_only_the_engine_is_checked_by_the_private_ca(ca: LocalCA) -> None:
    """As in a gateway, whose other providers have certificates of public CAs."""
    config = GatewayConfig(engine="https://localhost:1", engine_tls_ca=str(ca.file))

    async def work() -> None:
        async with serving(TLSIdentity(TLSConfig(*map(str, ca.issue("server"))))) as port:
            engine = f"https://localhost:{port}"
            contexts = make_engine_tls(replace(config, engine=f"{engine}/v1"))
            async with UpstreamClient(tls_by_origin=contexts) as upstream:
                reply = await upstream.send(ProviderRequest("GET", f"{engine}/x", {}, b""), 5.0)
                assert reply.status == 200
                reply.close()
                with pytest.raises(UpstreamFailed, match="CERTIFICATE_VERIFY_FAILED"):
                    await upstream.send(ProviderRequest("GET", f"https://127.0.0.1:{port}/x", {}, b""), 5.0)

    run(work)


def test_plain_http_to_a_tls_port_fails_at_once(ca: LocalCA) -> None:
    async def work() -> None:
        server = TLSIdentity(config_of(ca, "server"))
        async with serving(server) as port:
            began = time.monotonic()
            with (
                closing(HTTPConnectionPool(connect_timeout_s=5.0, idle_timeout_s=5.0)) as pool,
                pytest.raises(UpstreamFailed, match="closed the connection before a reply"),
            ):
                await pool.fetch("GET", f"http://localhost:{port}/", {}, timeout_s=10.0)
            assert time.monotonic() - began < 5.0 and server.failed_handshakes == 1

    run(work)


@pytest.mark.parametrize("loop", LOOPS)
def test_slow_client_gets_the_end_of_a_closed_connection(
    ca: LocalCA, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net_server, "TLS_SHUTDOWN_TIMEOUT_S", 0.1)
    size = 6_000_000  # more than the kernel's buffers hold

    async def reply(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": bytes(size)})

    def read_slowly(port: int) -> int:
        context = ssl.create_default_context(cafile=str(ca.file))
        context.load_cert_chain(*ca.issue("slow"))
        with (
            socket.create_connection(("localhost", port), timeout=10) as sock,
            context.wrap_socket(sock, server_hostname="localhost") as client,
        ):
            client.sendall(b"GET / HTTP/1.0\r\nhost: x\r\n\r\n")  # the connection's end is the reply's end
            received = len(client.recv(1))
            time.sleep(0.4)
            while data := client.recv(1 << 16):
                received += len(data)
            return received

    async def work() -> None:
        async with serving(TLSIdentity(config_of(ca, "server")), reply) as port:
            assert await asyncio.to_thread(read_slowly, port) > size

    run(work, loop)


def test_stream_lives_on_while_the_certificate_rotates(tmp_path: Path) -> None:
    ca, now = LocalCA(tmp_path), [0.0]
    files = ca.issue("server")
    server = TLSIdentity(TLSConfig(str(files.cert), str(files.key)), monotonic=lambda: now[0])
    rotated = asyncio.Event()

    async def stream(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"before ", "more_body": True})
        await rotated.wait()
        await send({"type": "http.response.body", "body": b"after"})

    async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        context = ssl.create_default_context(cafile=str(ca.file))
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return reader, writer, writer.get_extra_info("ssl_object").getpeercert(binary_form=True)

    async def work() -> None:
        async with serving(server, stream) as port:
            reader, writer, first = await connect(port)
            await reader.readuntil(b"before ")
            for target, source in zip(files, ca.issue("new"), strict=True):
                source.replace(target)
            now[0] += 10.0
            later, later_writer, second = await connect(port)
            assert second != first and server.reloads == 1
            rotated.set()
            assert b"after" in await reader.read() and b"after" in await later.read()
            writer.close()
            later_writer.close()

    run(work)


@pytest.mark.parametrize("loop", LOOPS)
def test_invalid_websocket_frame_gets_a_close_frame(ca: LocalCA, loop: str) -> None:
    async def accept(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        assert scope["scheme"] == "wss" and (await receive())["type"] == "websocket.disconnect"

    async def work() -> None:
        files = ca.issue("server")
        async with serving(TLSIdentity(TLSConfig(*map(str, files))), accept, max_message_bytes=1000) as port:
            context = ssl.create_default_context(cafile=str(ca.file))
            reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
            writer.write(UPGRADE)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"\xff\xff\xff\xff")
            assert (await reader.readexactly(4))[0] == 0x88
            writer.close()

    run(work, loop)
