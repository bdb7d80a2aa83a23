"""The gateway's HTTP client against a server that writes raw bytes.

The tests cover framings, chunk boundaries, reused and closed connections, slow readers and injection.
"""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.errors import UpstreamBroken, UpstreamTimeout, UpstreamUnreachable
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.net import connection_pool
from emberline.net.client_connection import MAX_BUFFERED_BYTES

ConnectionHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Plain; x=1\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nx-trailer: 1\r\n\r\n"


class Peer:
    """A server that answers each request with its next reply; None closes the connection."""

    def __init__(self, *replies: bytes | None, pieces: int = 0, pause: float = 0.0) -> None:
        self.replies = list(replies)
        self.pieces, self.pause = pieces, pause
        self.heads: list[bytes] = []
        self.connections = 0

    async def __aenter__(self) -> Peer:
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.replies:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                self.heads.append(head + await reader.readexactly(length))
                reply = self.replies.pop(0)
                if reply is None:
                    await asyncio.sleep(self.pause)
                    break
                size = self.pieces or len(reply) or 1
                for start in range(0, len(reply), size):
                    writer.write(reply[start : start + size])
                    await writer.drain()
                    if self.pieces:
                        await asyncio.sleep(self.pause)
                if b"connection: close" in reply or b"HTTP/1.0" in reply or b"until-close" in reply:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


def run(work: Callable[[UpstreamClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(20), UpstreamClient() as upstream:
            return await work(upstream)

    return asyncio.run(main())


async def fetch(
    upstream: UpstreamClient, url: str, body: bytes = b"{}", method: str = "POST", **headers: str
) -> tuple[int, bytes]:
    incoming = await upstream.send(ProviderRequest(method, url, headers, body), 2.0)
    try:
        return incoming.status, await incoming.read_all(2.0, 1 << 20)
    finally:
        incoming.close()


FRAMINGS = {
    "length": PLAIN,
    "chunked": CHUNKED,
    "close": b"HTTP/1.1 200 OK\r\nx: until-close\r\n\r\nhello",
    "old": b"HTTP/1.0 200 OK\r\n\r\nhello",
    "provisional": b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + PLAIN,
    "gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b"
    % (len(gzip.compress(b"hello")), gzip.compress(b"hello")),
    "deflate": b"HTTP/1.1 200 OK\r\ncontent-encoding: deflate\r\ncontent-length: %d\r\n\r\n%b"
    % (len(zlib.compress(b"hello")), zlib.compress(b"hello")),
}


@pytest.mark.parametrize("pieces", [0, 1, 7])
@pytest.mark.parametrize("frame", FRAMINGS)
def test_framings_are_independent_of_chunk_boundaries(frame: str, pieces: int) -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(FRAMINGS[frame], pieces=pieces) as peer:
            assert await fetch(upstream, f"{peer.url}/a?b=%20c", x_odd="1") == (200, b"hello")
            first = peer.heads[0]
            assert first.startswith(b"POST /a?b=%20c HTTP/1.1\r\nhost: 127.0.0.1:") and first.endswith(b"\r\n\r\n{}")
            assert b"accept-encoding: identity\r\n" in first and b"content-length: 2\r\n" in first

    run(work)


@pytest.mark.parametrize("frame", ["length", "chunked", "gzip"])
def test_cut_reply_is_broken(frame: str) -> None:
    whole = FRAMINGS[frame]

    async def work(upstream: UpstreamClient) -> None:
        for cut in {0, 5, 20, whole.index(b"\r\n\r\n") + 4, len(whole) - 6, len(whole) - 1}:
            async with Peer(whole[:cut]) as peer:  # has no further reply and closes
                with pytest.raises(UpstreamBroken):
                    await fetch(upstream, peer.url)

    run(work)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 1\r\n\r\nx",
        b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_malformed_reply_is_broken(reply: bytes) -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(reply) as peer:
            with pytest.raises(UpstreamBroken):
                await fetch(upstream, peer.url)

    run(work)


def test_endless_head_is_broken() -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 400_000, None) as peer:
            with pytest.raises(UpstreamBroken, match="head of the reply is larger"):
                await upstream.send(ProviderRequest("GET", peer.url, {}, b""), 5.0)

    run(work)


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"0\r\n" + b"x: y\r\n" * 20_000, b"1;x="])
def test_endless_trailer_is_broken(endless: bytes) -> None:
    begun = CHUNKED[: CHUNKED.index(b"0\r\n")]

    async def work(upstream: UpstreamClient) -> None:
        async with Peer(begun + endless + b"y" * 400_000, None) as peer:
            with pytest.raises(UpstreamBroken, match="trailer of the reply is larger"):
                await fetch(upstream, peer.url)

    run(work)


def test_trailers_are_not_headers() -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(CHUNKED.replace(b"x-trailer: 1", b"transfer-encoding: x\r\nx-trailer: 1")) as peer:
            incoming = await upstream.send(ProviderRequest("GET", peer.url, {}, b""), 2.0)
            assert await incoming.read_all(2.0, 100) == b"hello"
            assert incoming.headers == {"transfer-encoding": "chunked"}
            incoming.close()

    run(work)


def test_decompression_bomb_is_broken() -> None:
    packed = gzip.compress(b"\0" * (64 << 20))
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)

    async def work(upstream: UpstreamClient) -> None:
        async with Peer(head + packed) as peer:
            with pytest.raises(UpstreamBroken):
                await fetch(upstream, peer.url)

    run(work)


def _gzip_reply(body: bytes, *, length: bool = True) -> bytes:
    framed = b"content-length: %d\r\n" % len(body) if length else b""
    return b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n" + framed + b"\r\n" + body


@pytest.mark.parametrize("length", [True, False], ids=["content-length", "until close"])
@pytest.mark.parametrize("body", [gzip.compress(b"hello")[:-3], gzip.compress(b"hello") + b"more"], ids=["cut", "more"])
def test_gzip_must_end_with_reply(body: bytes, length: bool) -> None:
    """Otherwise a truncated body would pass as complete."""

    async def work(upstream: UpstreamClient) -> None:
        async with Peer(_gzip_reply(body, length=length)) as peer:
            with pytest.raises(UpstreamBroken, match="compressed body"):
                await fetch(upstream, peer.url)
        async with Peer(_gzip_reply(b"", length=True)) as peer:  # an empty body is valid
            assert await fetch(upstream, peer.url) == (200, b"")

    run(work)


def test_connections_are_reused() -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(PLAIN, CHUNKED, PLAIN, PLAIN) as peer:
            for _ in range(4):
                assert await fetch(upstream, peer.url) == (200, b"hello")
            assert peer.connections == 1
        async with Peer(PLAIN.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), PLAIN) as peer:
            for _ in range(2):
                assert await fetch(upstream, peer.url) == (200, b"hello")
            assert peer.connections == 2

    run(work)


def test_closed_idle_connection_is_retried() -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(PLAIN, None, PLAIN) as peer:
            assert await fetch(upstream, peer.url) == (200, b"hello")
            assert await fetch(upstream, peer.url) == (200, b"hello"), "the server closed the reused connection at once"
            assert peer.connections == 2 and len(peer.heads) == 3
        async with Peer(None, PLAIN) as peer:
            with pytest.raises(UpstreamBroken):
                await fetch(upstream, peer.url)  # on a new connection it is a failure
            assert len(peer.heads) == 1

    run(work)


def test_late_close_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "STALE_RETRY_WINDOW_S", 0.05)

    async def work(upstream: UpstreamClient) -> None:
        async with Peer(PLAIN, None, PLAIN, pause=0.2) as peer:
            assert await fetch(upstream, peer.url) == (200, b"hello")
            with pytest.raises(UpstreamBroken):
                await fetch(upstream, peer.url)
            assert peer.connections == 1 and len(peer.heads) == 2

    run(work)


def test_closed_idle_connections_lead_to_one_new_connection() -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(PLAIN, PLAIN, PLAIN, None, PLAIN) as peer:
            await asyncio.gather(*(fetch(upstream, peer.url) for _ in range(3)))
            assert peer.connections == 3
            assert await fetch(upstream, peer.url) == (200, b"hello")
            assert peer.connections == 4 and len(peer.heads) == 5, "the retry uses a new connection"

    run(work)


def test_partial_reply_is_not_retried() -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(PLAIN, b"HTTP/1.1 200 OK\r\nx: until-close\r\ncontent-length: 9\r\n\r\nhel", PLAIN) as peer:
            await fetch(upstream, peer.url)
            with pytest.raises(UpstreamBroken):
                await fetch(upstream, peer.url)
            assert len(peer.heads) == 2

    run(work)


def test_unrequested_reply_closes_connection() -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(PLAIN + PLAIN, PLAIN) as peer:
            assert await fetch(upstream, peer.url) == (200, b"hello")
            assert await fetch(upstream, peer.url) == (200, b"hello")
            assert peer.connections == 2, "an unrequested reply must not answer the next request"

    run(work)


def test_head_and_no_content() -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(PLAIN.removesuffix(b"hello"), b"HTTP/1.1 204 No Content\r\n\r\n") as peer:
            assert await fetch(upstream, peer.url, b"", "HEAD") == (200, b"")
            assert await fetch(upstream, peer.url, b"", "GET") == (204, b"")
            assert b"content-length" not in peer.heads[0] + peer.heads[1]

    run(work)


def test_close_before_end_closes_connection() -> None:
    async def work(upstream: UpstreamClient) -> None:
        gone = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
            await reader.read()
            gone.set()
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        incoming = await upstream.send(ProviderRequest("GET", url, {}, b""), 2.0)
        assert await incoming.read(1.0) == b"x"
        with pytest.raises(UpstreamTimeout):
            await incoming.read(0.05)
        incoming.close()
        incoming.close()
        await asyncio.wait_for(gone.wait(), 5)
        server.close()

    run(work)


def test_slow_reader_slows_sender() -> None:
    """The client's buffer is bounded, and all data arrives."""

    async def work(upstream: UpstreamClient) -> None:
        total = 40 << 20
        sent = 0

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
            while sent < total:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
            await reader.read()
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        incoming = await upstream.send(ProviderRequest("GET", url, {}, b""), 2.0)
        await asyncio.sleep(0.3)
        assert sent < total / 2, "only the system's buffers hold data"
        got = 0
        while data := await incoming.read(5.0):
            assert len(data) <= 16 * MAX_BUFFERED_BYTES
            got += len(data)
        assert got == total
        incoming.close()
        server.close()

    run(work)


def test_unreachable_provider() -> None:
    async def work(upstream: UpstreamClient) -> None:
        for url in ("http://127.0.0.1:1", "http://name.invalid", "https://127.0.0.1:1/x"):
            with pytest.raises(UpstreamUnreachable):
                await fetch(upstream, url)
        async with Peer(b"", PLAIN) as peer:
            with pytest.raises(UpstreamTimeout):
                await upstream.send(ProviderRequest("GET", peer.url, {}, b""), 0.1)

    run(work)


def test_tls_certificate_is_verified(tmp_path: Any) -> None:
    import ssl
    import subprocess

    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "key",
        "-out",
        "cert",
        "-days",
        "1",
    ]
    subprocess.run([*command, "-subj", "/CN=localhost"], cwd=tmp_path, check=True, capture_output=True)

    async def work(upstream: UpstreamClient) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tmp_path / "cert", tmp_path / "key")

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UpstreamUnreachable, match="TLS"):
            await fetch(upstream, f"https://localhost:{port}")
        server.close()

    run(work)


def test_public_only_rejects_private_addresses() -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(PLAIN) as peer:
            port = peer.url.rpartition(":")[2]
            for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]"):
                with pytest.raises(UpstreamUnreachable):
                    await upstream.send(
                        ProviderRequest("GET", f"http://{host}:{port}/", {}, b"", public_only=True), 2.0
                    )
            assert peer.connections == 0

    run(work)


@pytest.mark.parametrize("url", ["ftp://x/", "http:///x", "http://u:p@h/", "http://h:99999/", "nothing", ""])
def test_invalid_urls_are_rejected(url: str) -> None:
    async def work(upstream: UpstreamClient) -> None:
        with pytest.raises(InvalidRequest):
            await fetch(upstream, url)

    run(work)


@pytest.mark.parametrize("headers", [{"x": "a\r\nb: c"}, {"x": "a\nb"}, {"x\r\ny": "z"}, {"x": "\u2603"}])
def test_header_injection_is_rejected(headers: dict[str, str]) -> None:
    async def work(upstream: UpstreamClient) -> None:
        async with Peer(PLAIN) as peer:
            with pytest.raises(InvalidRequest):
                await upstream.send(ProviderRequest("POST", f"{peer.url}/x", headers, b""), 1.0)
            with pytest.raises(InvalidRequest):
                await upstream.send(ProviderRequest("POST", f"{peer.url}/x\r\ny", {}, b""), 1.0)

    run(work)
