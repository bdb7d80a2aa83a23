"""A gateway forwards the model API of an engine or router, but not their control endpoints."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from local_gateway import LocalGateway, Loop

from emberline.core.clock import SystemClock
from emberline.core.config import RouterConfig
from emberline.core.errors import InvalidRequest
from emberline.core.gateway_config import GatewayConfig
from emberline.gateway.http.main import build_gateway
from emberline.net.server import HTTPServer
from emberline.router.http.router_app import RouterApp
from emberline.router.worker_client import WorkerClient
from emberline.server.listener import bind_listener

CARD = {"name": "stranger", "incarnation": "1", "url": "http://127.0.0.1:9", "models": [{"name": "m"}]}
JSON = {"content-type": "application/json"}
TOKEN = {"authorization": "Bearer a-key-of-the-tests"}  # may use every path of a provider


class Router:
    """A real router without a cluster key, in a thread."""

    def __init__(self) -> None:
        self._loop = Loop()
        self._loop.run(self._start())

    async def _start(self) -> None:
        self.app = RouterApp(RouterConfig(migration_wait=0.0), WorkerClient(), SystemClock(), {})
        listener = bind_listener("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = HTTPServer(self.app)
        await self._server.start(listener)

    def workers(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/cluster/status", timeout=30) as reply:
            return [row["name"] for row in json.load(reply)["workers"]]

    def close(self) -> None:
        self._loop.run(self._server.stop(1.0))
        self._loop.close()


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.close()


@pytest.fixture(scope="module")
def gateway(router: Router, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    def write_config(_: dict[str, str]) -> dict[str, Any]:
        custom = {"base_url": router.url, "speaks": ["openai-chat"]}
        return {"emberline": {"base_url": router.url}, "custom-mine": custom}

    home: Path = tmp_path_factory.mktemp("boundary")
    with LocalGateway(home, (), write_config) as made:
        yield made


CONTROL = ("cluster/register", "cluster/drain", "cluster/beat", "cluster/leave", "cluster/resume", "cluster/prefill")
WATCHED = ("cluster/status", "cluster/events", "metrics", "stats", "health", "openapi.json", "")


@pytest.mark.parametrize("path", CONTROL)
def test_gateway_forwards_no_cluster_calls_to_the_engine(gateway: LocalGateway, router: Router, path: str) -> None:
    status, _, body = gateway.post(f"/v1/default/default/emberline/{path}", CARD, TOKEN)
    assert status == 404 and json.loads(body)["error"]["code"] == "not_found"
    step = [{"provider": "emberline", "endpoint": path, "query": CARD}]
    assert gateway.post("/v1/default/default", step, TOKEN)[0] == 404
    assert router.workers() == []


@pytest.mark.parametrize("path", WATCHED)
def test_gateway_forwards_no_statistics_of_the_engine(gateway: LocalGateway, path: str) -> None:
    assert gateway.post(f"/v1/default/default/emberline/{path}", b"", TOKEN, "GET")[0] in (404, 405)


def test_gateway_forwards_the_engines_model_api(gateway: LocalGateway) -> None:
    base = "/v1/default/default/emberline"
    status, _, body = gateway.post(f"{base}/v1/models", b"", TOKEN, "GET")
    assert status == 200 and json.loads(body)["data"] == []
    assert b"some/model" in gateway.post(f"{base}/v1/models/some/model", b"", TOKEN, "GET")[2]
    for path in ("v1/chat/completions", "v1/messages/count_tokens", "tokenize"):
        assert b"no worker has registered" in gateway.post(f"{base}/{path}", {"model": "m"})[2], path


def test_router_refuses_cluster_calls_that_a_gateway_forwarded(gateway: LocalGateway, router: Router) -> None:
    """Also if the gateway has the router as a custom provider."""
    for headers in ({}, {"via": ""}, {"connection": "via"}):
        status, _, body = gateway.post("/v1/default/default/custom-mine/cluster/register", CARD, {**TOKEN, **headers})
        assert status == 403 and b"through a proxy" in body
    assert router.workers() == []


def test_router_without_a_key_takes_workers_of_this_machine(router: Router) -> None:
    request = urllib.request.Request(f"{router.url}/cluster/register", json.dumps(CARD).encode(), JSON)
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert reply.status == 200
    assert router.workers() == ["stranger"]
    leave = json.dumps({"name": "stranger", "incarnation": "1"}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{router.url}/cluster/leave", leave, JSON), timeout=30).close()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/default/default", "/v1/default/default/custom-mine/any"])
def test_gateway_requires_json_content_type(gateway: LocalGateway, path: str, kind: str) -> None:
    status, _, body = gateway.post(path, {"model": "m"}, {"content-type": kind})
    assert status == 415 and b"-H 'content-type: application/json'" in body


def test_gateway_forwards_forms_and_binary_data(gateway: LocalGateway) -> None:
    for kind in ("multipart/form-data; boundary=b", "audio/wav"):
        status, _, body = gateway.post("/v1/default/default/custom-mine/any", b"--b--", {"content-type": kind, **TOKEN})
        assert status == 404 and b"the path '/any' does not exist" in body  # the router's own message


def test_gateway_beyond_this_machine_needs_keys(tmp_path: Path) -> None:
    async def start(found: dict[str, Any], **config: Any) -> list[bool]:
        store, key = f"sqlite:{tmp_path / 'store'}", str(tmp_path / "master")
        async with AsyncExitStack() as stack:
            app = await build_gateway(
                GatewayConfig(store=store, master_key=key, **config), found, stack, require_keys=True
            )
            settings = await app._gateway._settings_source.get_settings("default", "default")
            return [settings.authentication, app._require_keys]

    with pytest.raises(InvalidRequest, match="without authentication"):
        asyncio.run(start({}))
    assert asyncio.run(start({}, api_keys=("a-key-of-the-tests",))) == [True, True]
