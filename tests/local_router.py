"""A router in the test's event loop, with workers whose connections the test itself answers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

import msgspec

from emberline.cluster.registration import DialectName, Heartbeat, ModelRegistration, WorkerRegistration
from emberline.core.clock import SystemClock
from emberline.core.config import RouterConfig
from emberline.net.server import HTTPServer
from emberline.router.http.router_app import RouterApp
from emberline.router.worker_client import WorkerClient

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
PATH = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
REQUEST = b"%bcontent-length: %d\r\n\r\n%b" % (PATH, len(BODY), BODY)
MODEL = ModelRegistration("m", "l", 8192, 8, 65536, 16)

AnswerConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class LocalRouter:
    def __init__(self, config: RouterConfig | None = None) -> None:
        self.app = RouterApp(config or RouterConfig(), WorkerClient(), SystemClock(), {})
        self._server = HTTPServer(self.app)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    async def start(self) -> LocalRouter:
        await self._server.start(self._listener)
        return self

    async def stop(self, seconds: float = 0.1) -> None:
        await self._server.stop(seconds)

    async def add_worker(
        self, name: str, answer: AnswerConnection, dialect: DialectName = "native", path: str = "", model: str = "m"
    ) -> None:
        """Register a worker that is alive and whose connections `answer` answers; its URL ends with `path`."""
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}"
        served = msgspec.structs.replace(MODEL, name=model)
        self.app.dispatcher.register(WorkerRegistration(name, f"i{name}", url, (served,), dialect=dialect))
        self.app.dispatcher.record_heartbeat(Heartbeat(name, f"i{name}"))

    async def relay_request(self) -> bytes:
        """Send a streamed chat completion through the router and return the whole reply."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(REQUEST)
        async with asyncio.timeout(20):
            return await reader.read()
