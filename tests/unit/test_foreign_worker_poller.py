"""Servers of other kinds: how they are found, with which key, and what is logged of those that are not."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from emberline.core.clock import SystemClock
from emberline.core.config import RouterConfig
from emberline.core.foreign_config import ForeignWorkerConfig
from emberline.net.errors import UpstreamUnreachable
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.foreign_worker_poller import ForeignWorkerPoller
from emberline.router.http.routed_request import RoutedRequest
from emberline.router.request_summary import RequestSummary
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker_client import HTTPClientResponse, WorkerClient

MODELS = b'{"data": [{"id": "m", "max_model_len": 512}]}'
SERVER = ForeignWorkerConfig("http://v:8000", "vllm")


@dataclass
class Server:
    """One that has a key, or no /health, or is away."""

    key: str | None = None
    health: int = 200
    away: bool = False
    asked: list[str] = field(default_factory=list)

    async def request(self, at: str, call: UpstreamRequest) -> HTTPClientResponse:
        self.asked.append(call.path)
        if self.away:
            raise UpstreamUnreachable("refused")
        wrong = self.key is not None and call.headers.get("authorization") != f"Bearer {self.key}"
        status = 401 if wrong and call.path != "/health" else self.health if call.path == "/health" else 200

        async def read_all() -> bytes:
            return MODELS

        return cast("HTTPClientResponse", SimpleNamespace(status=status, read_all=read_all, close=lambda: None))


def poll_servers(server: Server, key: str | None = None, rounds: int = 2) -> Dispatcher:
    dispatch = Dispatcher(RouterConfig(), SystemClock())
    sponsor = ForeignWorkerPoller(dispatch, cast("WorkerClient", server), [SERVER], 0.01, key)

    async def main() -> None:
        looking = asyncio.create_task(sponsor.run())
        async with asyncio.timeout(20):
            while len(server.asked) < 3 * rounds:
                await asyncio.sleep(0.01)
        looking.cancel()

    asyncio.run(main())
    return dispatch


@pytest.mark.parametrize("health", [200, 404, 405])
def test_server_without_health_check_is_found_by_models(health: int) -> None:
    assert set(poll_servers(Server(health=health)).workers) == {"vllm v:8000"}


def test_servers_behind_one_host_have_different_names() -> None:
    dispatch, server = Dispatcher(RouterConfig(), SystemClock()), Server()
    places = [ForeignWorkerConfig.parse(f"vllm=http://v:8000/{name}/") for name in ("a", "b")]
    sponsor = ForeignWorkerPoller(dispatch, cast("WorkerClient", server), places, 0.01)

    async def main() -> None:
        looking = asyncio.create_task(sponsor.run())
        async with asyncio.timeout(20):
            while len(dispatch.workers) < 2:
                await asyncio.sleep(0.01)
        looking.cancel()

    asyncio.run(main())
    assert {name: dispatch.worker_url(worker) for name, worker in dispatch.workers.items()} == {
        "vllm v:8000/a": "http://v:8000/a",
        "vllm v:8000/b": "http://v:8000/b",
    }


def test_server_with_key_is_registered() -> None:
    assert set(poll_servers(Server(key="secret"), "secret").workers) == {"vllm v:8000"}


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (Server(key="secret"), "/v1/models answered 401 (hint: set --foreign-key-env"),
        (Server(key="secret", health=404), "the health check answered 401 (hint: set --foreign-key-env"),
        (Server(health=503), "the health check answered 503"),
        (Server(away=True), "UpstreamUnreachable: refused"),
    ],
)
def test_unused_server_is_logged_once(server: Server, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "emberline.router")
    assert not poll_servers(server).workers
    (message,) = caplog.messages
    assert message.startswith(f"Server not used as a worker: kind=vllm url=http://v:8000 reason={why}")


def test_requests_carry_foreign_key() -> None:
    dispatch = poll_servers(Server(key="secret"), "secret")
    (worker,) = dispatch.workers.values()
    call = UpstreamRequest("POST", "/v1/chat/completions", {"authorization": "Bearer client"}, b"{}")
    for generates in (True, False):
        for key, expected in (("secret", "Bearer secret"), (None, "Bearer client")):
            exchange: Any = SimpleNamespace(status=None)
            trip = RoutedRequest(
                exchange, RequestSummary("m", 0, False, None), call, 1, 2, None, 9.0, 3, 3, generates, False, key
            )
            sent = asyncio.run(trip.build_worker_request(worker, 0.0))
            assert sent is not None and sent.headers["authorization"] == expected
