"""Requests without a valid key are answered before a byte of their body is read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_gateway import LocalGateway
from local_router import LocalRouter

from emberline.core.config import RouterConfig
from emberline.net.body_budget import body_budget
from emberline.server.access import AccessPolicy
from emberline.server.exchange import Exchange
from emberline.server.route_table import HTTPRoute, RouteTable

ADMIN = b"authorization: Bearer a-key-of-the-tests\r\n"
WRONG = b"authorization: Bearer ember-wrong\r\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    home: Path = tmp_path_factory.mktemp("gateway")
    with LocalGateway(
        home, ["openai"], lambda urls: {"openai": {"base_url": urls["openai"], "key": "k"}}, authentication=True
    ) as started:
        yield started


def send_head(port: int, path: bytes, headers: bytes = b"", method: bytes = b"POST") -> bytes:
    """Send the head of a request with a large body, but no byte of the body. Return what the server sends first."""
    head = b"%b %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 30000000\r\n%b\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head % (method, path, headers))
        received = b""
        while b"\r\n\r\n" not in received and (data := connection.recv(1 << 16)):
            received += data
    return received


@pytest.mark.parametrize("expect", [b"", b"expect: 100-continue\r\n"], ids=["plain", "expect"])
@pytest.mark.parametrize(
    "path",
    [
        b"/v1/chat/completions",
        b"/v1/messages",
        b"/v1/default/default",
        b"/v1/default/default/openai/v1/files",
        b"/v1/default/default/compat/chat/completions",
        b"/accounts/default/ai/run/@cf/model",
        b"/accounts/default/ai/v1/chat/completions",
        b"/admin/accounts/default/keys",
        b"/client/v4/accounts/default/ai-gateway/gateways",
    ],
)
def test_gateway_refuses_before_the_body(gateway: LocalGateway, path: bytes, expect: bytes) -> None:
    port = int(gateway.url.rpartition(":")[2])
    assert send_head(port, path, expect).startswith(b"HTTP/1.1 401 ")
    assert send_head(port, path, WRONG.replace(b"ember-", b"sk-") + expect).startswith(b"HTTP/1.1 401 ")
    assert body_budget.used_bytes == 0


def test_gateway_refuses_unknown_paths_and_methods_before_the_body(gateway: LocalGateway) -> None:
    port = int(gateway.url.rpartition(":")[2])
    assert send_head(port, b"/nowhere").startswith(b"HTTP/1.1 404 ")
    assert send_head(port, b"/admin/nowhere").startswith(b"HTTP/1.1 404 ")
    assert send_head(port, b"/v1/chat/completions", method=b"PUT").startswith(b"HTTP/1.1 401 ")
    assert send_head(port, b"/v1/chat/completions", ADMIN, method=b"PUT").startswith(b"HTTP/1.1 405 ")
    assert send_head(port, b"/admin/accounts/default/gateways", method=b"PATCH").startswith(b"HTTP/1.1 405 ")


def test_gateway_asks_a_caller_with_a_key_for_the_body(gateway: LocalGateway) -> None:
    port = int(gateway.url.rpartition(":")[2])
    for path in (b"/v1/chat/completions", b"/v1/default/default"):
        reply = send_head(port, path, ADMIN + b"expect: 100-continue\r\n")
        assert reply.startswith(b"HTTP/1.1 100 Continue\r\n"), reply


def test_compressed_body_is_refused(gateway: LocalGateway) -> None:
    port = int(gateway.url.rpartition(":")[2])
    reply = send_head(port, b"/v1/chat/completions", ADMIN + b"content-encoding: gzip\r\n")
    assert reply.startswith(b"HTTP/1.1 415 ")
    assert send_head(port, b"/v1/chat/completions", b"content-encoding: gzip\r\n").startswith(b"HTTP/1.1 401 ")


def test_router_refuses_before_the_body() -> None:
    async def main() -> None:
        router = await LocalRouter(RouterConfig(api_keys=("a-long-enough-key-of-the-router",))).start()
        try:
            for path in (b"/v1/chat/completions", b"/v1/responses/resp_1", b"/cluster/register", b"/tokenize"):
                headers = b"authorization: Bearer x\r\nexpect: 100-continue\r\nx-forwarded-for: 1.1.1.1\r\n"
                reply = await asyncio.to_thread(send_head, router.port, path, headers)
                assert reply[:13] in (b"HTTP/1.1 401 ", b"HTTP/1.1 403 "), (path, reply)
        finally:
            await router.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_route_table_checks_the_key_before_the_handler() -> None:
    """The engine's endpoints and the worker's cluster endpoints are routes of this table."""
    statuses: list[int] = []

    async def handler(exchange: Exchange) -> None:
        raise AssertionError("the handler must not run without the key")

    async def receive() -> dict[str, object]:
        raise AssertionError("the body must not be read without the key")

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(int(str(message["status"])))

    routes = {"/a": HTTPRoute(handler), "/c": HTTPRoute(handler, required_key="cluster"), "/s": HTTPRoute(handler, "")}
    table = RouteTable(routes, HTTPRoute(handler, "GET"), {}, AccessPolicy(("k",), ("c",)), "")
    for path in routes:
        scope = {"method": "POST", "path": path, "headers": [(b"content-type", b"application/json")]}
        asyncio.run(table.handle(Exchange(scope, receive, send)))
    assert statuses == [401, 401, 401]
