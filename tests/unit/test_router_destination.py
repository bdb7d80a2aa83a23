"""The header x-gateway-destination-endpoint: a request goes to the worker that an endpoint picker named."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from local_router import LocalRouter

from emberline.core.errors import InvalidRequest
from emberline.router.destination import endpoint_of_url, parse_endpoints

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
REPLY = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{"'


class TwoWorkers:
    """A router with the workers a and b, which count their requests. A failing worker closes the connection."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.failing: set[str] = set()

    async def start(self) -> TwoWorkers:
        self.router = await LocalRouter().start()
        for name in ("a", "b"):
            await self.router.add_worker(name, self._answer_as(name))
        self.endpoints = {name: worker.endpoint for name, worker in self.router.app.dispatcher.workers.items()}
        return self

    def _answer_as(self, name: str):  # type: ignore[no-untyped-def]
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            self.requests[name] += 1
            if name not in self.failing:
                writer.write(REPLY.replace(b'{"', b"{}"))
            writer.close()

        return answer

    async def post(self, destination: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.router.port)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        head += f"x-gateway-destination-endpoint: {destination}\r\ncontent-length: {len(BODY)}\r\n\r\n"
        writer.write(head.encode() + BODY)
        async with asyncio.timeout(20):
            return await reader.read()


def test_requests_go_to_the_named_worker() -> None:
    async def run() -> None:
        cluster = await TwoWorkers().start()
        for _ in range(4):
            assert (await cluster.post(cluster.endpoints["b"])).startswith(b"HTTP/1.1 200")
        assert cluster.requests == {"b": 4}
        assert (await cluster.post(f"10.9.9.9:1, {cluster.endpoints['a']}")).startswith(b"HTTP/1.1 200")
        assert cluster.requests["a"] == 1
        await cluster.router.stop()

    asyncio.run(run())


def test_unknown_worker_is_a_clear_error() -> None:
    async def run() -> None:
        cluster = await TwoWorkers().start()
        reply = await cluster.post("10.9.9.9:8001")
        assert reply.startswith(b"HTTP/1.1 400") and b"10.9.9.9:8001, which is not a worker of this router" in reply
        assert b'"param":"x-gateway-destination-endpoint"' in reply.replace(b'": "', b'":"')
        assert not cluster.requests
        await cluster.router.stop()

    asyncio.run(run())


def test_request_moves_on_if_the_named_worker_fails() -> None:
    async def run() -> None:
        cluster = await TwoWorkers().start()
        cluster.failing.add("b")
        assert (await cluster.post(cluster.endpoints["b"])).startswith(b"HTTP/1.1 200")
        assert cluster.requests == {"b": 1, "a": 1}
        await cluster.router.stop()

    asyncio.run(run())


@pytest.mark.parametrize("header", ["10.0.0.1", ":8001", "10.0.0.1:http", ",", ",".join(["a:1"] * 17)])
def test_malformed_header_is_refused(header: str) -> None:
    with pytest.raises(InvalidRequest, match="x-gateway-destination-endpoint"):
        parse_endpoints(header)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://10.0.0.1:8001", "10.0.0.1:8001"),
        ("https://Host", "host:443"),
        ("http://[fd00::1]:8001/x", "[fd00::1]:8001"),
    ],
)
def test_endpoint_of_url(url: str, endpoint: str) -> None:
    assert endpoint_of_url(url) == endpoint
