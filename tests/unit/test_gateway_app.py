"""The management API with clients that hang or disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from emberline.core.gateway_config import GatewayConfig
from emberline.gateway.core.errors import StoreBusy
from emberline.gateway.core.identity import ANONYMOUS, Identity
from emberline.gateway.http import gateway_app
from emberline.gateway.http.gateway_app import GatewayApp
from emberline.net.request_response_cycle import ReplyInterrupted

Message = dict[str, Any]
EXPORT = "/admin/accounts/default/logs/export"


class Gateway:
    async def identify(self, headers: dict[str, str]) -> Identity:
        return ANONYMOUS


class Admin:
    """A management API whose export never ends."""

    def __init__(self) -> None:
        self.lines = 0

    def is_export(self, method: str, path: str) -> bool:
        return path == EXPORT

    async def export(self, *request: Any) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            self.lines += 1
            yield b"{}\n"


class Client:
    """An ASGI client that sends one request."""

    def __init__(self, method: str, path: str) -> None:
        self.scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": []}
        self.sent: list[Message] = []
        self.disconnects = asyncio.Event()
        self.reads = True

    async def receive(self) -> Message:
        await self.disconnects.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if not self.reads:
            await asyncio.sleep(3600)
        self.sent.append(message)

    def send_request(self, admin: Admin) -> asyncio.Task[None]:
        about: Any = (GatewayConfig(), Gateway(), None, admin, None, None, None, None, {}, None)
        return asyncio.ensure_future(GatewayApp(*about)(self.scope, self.receive, self.send))


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work(), 20))


def test_gateway_is_not_ready_while_the_store_is_full() -> None:
    class FullStore:
        async def version(self) -> int:
            return 0

    class FailingWriter:
        def check_store(self) -> None:
            raise StoreBusy("log records cannot be written to the store: disk full")

    async def work() -> None:
        client = Client("GET", "/health/ready")
        about: Any = (GatewayConfig(), Gateway(), None, Admin(), None, None, FullStore(), None, {}, FailingWriter())
        await GatewayApp(*about)(client.scope, client.receive, client.send)
        assert client.sent[0]["status"] == 503 and b"disk full" in client.sent[1]["body"]

    run(work)


def test_client_disconnect_ends_export() -> None:
    async def work() -> None:
        client, admin = Client("GET", EXPORT), Admin()
        task = client.send_request(admin)
        while admin.lines < 3:
            await asyncio.sleep(0)
        client.disconnects.set()
        await task
        assert client.sent[0]["status"] == 200

    run(work)


def test_slow_reader_of_export_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_app, "EXPORT_SEND_TIMEOUT_S", 0.01)

    async def work() -> None:
        client = Client("GET", EXPORT)
        task = client.send_request(Admin())
        while len(client.sent) < 3:
            await asyncio.sleep(0)
        client.reads = False
        with pytest.raises(ReplyInterrupted):
            await task

    run(work)
