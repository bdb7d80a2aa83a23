"""The router sends on known endpoints only: its requests carry the keys of the workers."""

from __future__ import annotations

import asyncio

import pytest
from local_router import LocalRouter

from emberline.core.config import RouterConfig


async def send(targets: list[tuple[str, str]]) -> tuple[list[bytes], list[bytes]]:
    """Send requests through a router with a foreign worker. Return the clients' statuses and what the worker got."""
    received: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append((await reader.readuntil(b"\r\n")).strip())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    router = await LocalRouter(RouterConfig(foreign_key="the-operator's-key")).start()
    statuses = []
    try:
        await router.add_worker("w", answer, "vllm")
        for method, target in targets:
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            statuses.append((await reader.read()).split(b" ")[1])
            writer.close()
    finally:
        await router.stop()
    return statuses, received


def run(*targets: tuple[str, str]) -> tuple[list[bytes], list[bytes]]:
    return asyncio.run(asyncio.wait_for(send([*targets]), 30))


@pytest.mark.parametrize(
    "path",
    [
        "../../x",
        "..%2f..%2fx",
        "%2e%2e/%2e%2e/x",
        "%2E%2E%2Fx",
        "a/../../x",
        "a%2f..%2fx",
        "a%252e",
        "a%3fx=y",
        "a%3F",
        "a%23",
        "a;x",
        "a%5cx",
        "a/",
        "a//input_items",
        "a/input_items/",
        "a/other",
        "%0d%0a",
        ".",
        "..",
        "",
        "a%00",
        "\x7f",
        "%ff",
        "a" * 300,
    ],
)
def test_other_paths_below_responses_are_not_sent_on(path: str) -> None:
    statuses, received = run(*((method, "/v1/responses/" + path) for method in ("GET", "POST", "DELETE", "PUT")))
    assert received == [] and {*statuses} <= {b"404", b"400"}


def test_stored_responses_are_sent_on_in_canonical_form() -> None:
    statuses, received = run(
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/%72esponses/resp%5f1"),
        ("GET", "/v1/responses/resp_1/input_items?limit=2&order=asc"),
        ("POST", "/v1/responses/resp_1/cancel"),
    )
    assert statuses == [b"200"] * 4
    assert received == [
        b"GET /v1/responses/resp_1 HTTP/1.1",
        b"DELETE /v1/responses/resp_1 HTTP/1.1",
        b"GET /v1/responses/resp_1/input_items?limit=2&order=asc HTTP/1.1",
        b"POST /v1/responses/resp_1/cancel HTTP/1.1",
    ]


def test_other_methods_are_refused() -> None:
    ids = "/v1/responses/resp_1"
    statuses, received = run(("PUT", ids), ("POST", ids), ("PATCH", ids), ("DELETE", f"{ids}/cancel"))
    assert statuses == [b"405"] * 4 and received == []
