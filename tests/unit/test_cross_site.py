"""What web pages of other sites may make a visitor's browser do, and listeners that other machines reach."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from scripted_engine import WorkerHarness

from emberline.core.clock import SystemClock
from emberline.core.config import RouterConfig, ServerConfig, WorkerConfig
from emberline.core.errors import InvalidRequest
from emberline.router.http.main import run_router
from emberline.router.http.router_app import RouterApp
from emberline.router.worker_client import WorkerClient
from emberline.server.cross_site import MAX_KNOWN_HOSTS, CrossSiteGuard, CrossSitePolicy
from emberline.server.listener import bind_listener, check_exposure
from emberline.worker.engine_app import EngineApp
from emberline.worker.main import serve

CHAT = {"model": "m", "messages": [{"role": "user", "content": "why"}]}
OPEN = CrossSitePolicy.build((), (), is_loopback=True, is_authenticated=False)


class Page:
    """One request of a browser, and the reply."""

    def __init__(self, policy: CrossSitePolicy, method: str, headers: dict[str, str], vouched: bool = False) -> None:
        self.reached = False
        self.status, self.headers, self.body = 0, {}, b""
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        kind = "websocket" if method == "SOCKET" else "http"
        scope = {"type": kind, "method": method, "path": "/v1/messages", "headers": pairs, "client": ("127.0.0.1", 1)}

        async def vouch(_: Any) -> bool:
            return vouched

        guard = CrossSiteGuard(self._app, policy, vouch)
        asyncio.run(guard(scope, self._receive, self._send))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached = True
        if scope["type"] == "http":
            theirs = [(b"access-control-allow-origin", b"*")]  # such as a provider writes
            await send({"type": "http.response.start", "status": 200, "headers": theirs})
            await send({"type": "http.response.body", "body": b"{}"})

    async def _receive(self) -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if "status" in message:
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        self.body += message.get("body", b"")


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "a.localhost", "127.9.9.9", "10.0.0.7:80"]
)
def test_own_host_names_are_allowed(host: str) -> None:
    assert Page(OPEN, "POST", {"host": host}).reached
    assert Page(OPEN, "SOCKET", {"host": host}).reached


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "10.0.0.7.evil.example", "localhost.x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "SOCKET"])
def test_rebound_host_name_is_refused(host: str, method: str) -> None:
    """DNS rebinding: to the browser such a page is of the same origin."""
    page = Page(OPEN, method, {"host": host, "origin": f"http://{host}", "sec_fetch_site": "same-origin"})
    assert page.status == 403 and not page.reached and b"allowed-hosts" in page.body


def test_configured_hosts_and_known_keys_are_allowed() -> None:
    named = CrossSitePolicy.build((), ("Proxy.Example",), is_loopback=True, is_authenticated=False)
    assert Page(named, "POST", {"host": "proxy.example:443"}).reached
    assert not Page(named, "POST", {"host": "other.example"}).reached
    assert Page(OPEN, "POST", {"host": "any.example"}, vouched=True).reached
    keyed = CrossSitePolicy.build((), (), is_loopback=True, is_authenticated=True)
    assert Page(keyed, "POST", {"host": "any.example"}).reached
    beyond = CrossSitePolicy.build((), (), is_loopback=False, is_authenticated=False)
    assert Page(beyond, "POST", {"host": "any.example"}).reached
    listed = CrossSitePolicy.build((), ("any.example",), is_loopback=False, is_authenticated=True)
    assert not Page(listed, "POST", {"host": "evil.example"}).reached


def test_host_allowed_by_key_is_not_cached() -> None:
    reached = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["vouched"])

    async def vouch(scope: Any) -> bool:
        return bool(scope["vouched"])

    async def ignore(*_: Any) -> Any:
        return None

    guard = CrossSiteGuard(app, OPEN, vouch)
    asked = [(b"localhost", False), (b"any.example", True), (b"any.example", False), (b"localhost", False)]
    asked += [(b"127.0.0.1:%d" % number, False) for number in range(2 * MAX_KNOWN_HOSTS)]  # each is another header

    async def run() -> None:
        for host, vouched in asked:
            scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", host)], "vouched": vouched}
            await guard(scope, ignore, ignore)

    asyncio.run(run())
    assert reached == [False, True, *[False] * (1 + 2 * MAX_KNOWN_HOSTS)]
    assert len(guard._known_hosts) == MAX_KNOWN_HOSTS


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "SOCKET"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9", "https://localhost"])
def test_other_sites_cannot_post(method: str, origin: str) -> None:
    page = Page(OPEN, method, {"host": "127.0.0.1:8080", "origin": origin})
    assert page.status == 403 and not page.reached
    told = json.loads(page.body)["error"]
    assert "--cors-origins" in told["message"]


@pytest.mark.parametrize("method", ["POST", "SOCKET"])
def test_own_pages_may_call(method: str) -> None:
    assert Page(OPEN, method, {"host": "127.0.0.1:8080", "origin": "http://127.0.0.1:8080"}).reached
    behind = {"host": "127.0.0.1:8080", "origin": "https://our.example", "sec_fetch_site": "same-origin"}
    assert Page(OPEN, method, behind).reached


def test_preflight_follows_allowed_origins() -> None:
    asked = {
        "host": "localhost",
        "origin": "https://chat.example",
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization, content-type",
    }
    refused = Page(OPEN, "OPTIONS", asked)
    assert refused.status == 403 and not refused.reached and "access-control-allow-origin" not in refused.headers
    for origins in (("https://chat.example/",), ("*",)):
        policy = CrossSitePolicy.build(origins, (), is_loopback=True, is_authenticated=False)
        page = Page(policy, "OPTIONS", asked)
        assert page.status == 204 and not page.reached
        assert page.headers["access-control-allow-origin"] == "https://chat.example"
        assert page.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "POST" in page.headers["access-control-allow-methods"]
        page = Page(policy, "POST", {"host": "localhost", "origin": "https://chat.example"})
        assert page.reached and page.headers["access-control-allow-origin"] == "https://chat.example"
        assert page.headers["vary"] == "origin"
    listed = CrossSitePolicy.build(("https://chat.example",), (), is_loopback=True, is_authenticated=True)
    other = Page(listed, "POST", {
        "host": "localhost", "origin": "https://other.example"})  # fmt: skip
    assert other.status == 403


def test_provider_cors_headers_are_replaced() -> None:
    page = Page(OPEN, "GET", {"host": "localhost", "origin": "https://other.example"})
    assert page.reached and "access-control-allow-origin" not in page.headers


@pytest.mark.parametrize("text", ["chat.example", "https://chat.example/path", ""])
def test_malformed_origin_is_refused_at_start(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not a web origin"):
        CrossSitePolicy.build((text,), (), is_loopback=True, is_authenticated=False)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_json_with_other_content_type_is_refused(kind: str) -> None:
    made = WorkerHarness(lambda before, index: before + "Because.")
    answer = made.post("/v1/chat/completions", CHAT, content_type=kind)
    assert answer.status == 415 and answer.json["error"]["code"] == "unsupported_media_type"
    assert "-H 'content-type: application/json'" in answer.json["error"]["message"]
    assert made.post("/v1/chat/completions", CHAT, content_type="application/json; charset=utf-8").status == 200


def fetch(app: Any, path: str, **headers: str) -> int:
    """The status of a GET."""
    seen: list[Any] = []
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": path, "headers": pairs, "client": ("10.0.0.7", 1)}

    async def send(message: dict[str, Any]) -> None:
        seen.append(message)

    asyncio.run(app(scope, None, send))
    return int(seen[0]["status"])


def build_app(**config: Any) -> EngineApp:
    made = WorkerHarness(lambda before, index: before + "Because.")
    settings = ServerConfig(models={"m": "m"}, embedder=None, **config)
    return EngineApp(settings, made.app.engine, made.catalog, None, {})


def build_router_app(**config: Any) -> RouterApp:
    async def make() -> RouterApp:
        return RouterApp(RouterConfig(**config), WorkerClient(), SystemClock(), {})

    return asyncio.run(make())


def test_router_metrics_need_key() -> None:
    for path in ("/metrics", "/cluster/status"):
        assert fetch(build_router_app(), path) == 200
        keyed = build_router_app(api_keys=("secret",), cluster_key="cluster-secret")
        assert fetch(keyed, path) == fetch(keyed, path, authorization="Bearer wrong") == 401
        assert fetch(keyed, path, authorization="Bearer secret") == 200
        assert fetch(keyed, path, authorization="Bearer cluster-secret") == 200  # what watches a cluster has its key
        assert fetch(keyed, "/health/live") == 200


@pytest.mark.parametrize("path", ["/metrics", "/stats"])
def test_worker_metrics_need_key(path: str) -> None:
    keyed = build_app(api_keys=("secret",))
    assert fetch(keyed, path) == fetch(keyed, path, authorization="Bearer wrong") == 401
    assert fetch(keyed, path, authorization="Bearer secret") != 401  # the engine here has none to tell


def test_exposed_worker_accepts_only_its_router() -> None:
    closed = build_app(closed=True, worker=WorkerConfig(("http://10.0.0.1:1",)), cluster_key="cluster-secret")
    assert fetch(closed, "/v1/models") == fetch(closed, "/metrics") == 401
    assert fetch(closed, "/v1/models", authorization="Bearer cluster-secret") == 401
    assert fetch(closed, "/v1/models", x_emberline_cluster_key="cluster-secret") == 200
    assert fetch(closed, "/v1/models", x_emberline_cluster_key="wrong") == 401


def test_metrics_need_no_certificate_but_calls_of_the_router_do() -> None:
    tls = {"tls_cert": "c", "tls_key": "k", "tls_ca": "ca", "tls_client_certs": "cluster"}
    keyed = build_router_app(api_keys=("secret",), cluster_key="cluster-secret", **tls)
    assert fetch(keyed, "/metrics", authorization="Bearer cluster-secret") == 200
    worker = WorkerConfig(("https://10.0.0.1:1",))
    closed = build_app(closed=True, worker=worker, cluster_key="cluster-secret", **tls)
    assert fetch(closed, "/metrics", authorization="Bearer cluster-secret") not in (401, 403)
    assert fetch(closed, "/v1/models", x_emberline_cluster_key="cluster-secret") == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_exposed_listener_needs_authentication(host: str) -> None:
    for authenticated, is_open in ((True, False), (False, True)):
        listener = bind_listener(host, 0)
        check_exposure(listener, is_authenticated=authenticated, allows_anyone=is_open, hint="")
        listener.close()
    with pytest.raises(InvalidRequest, match=r"without authentication.*--open"):
        check_exposure(bind_listener(host, 0), is_authenticated=False, allows_anyone=False, hint="give --api-key KEY")
    local = bind_listener("127.0.0.1", 0)
    check_exposure(local, is_authenticated=False, allows_anyone=False, hint="")
    local.close()


def test_servers_refuse_to_start_exposed_without_authentication() -> None:
    worker = WorkerConfig(("http://127.0.0.1:1",))
    for config in (ServerConfig(host="0.0.0.0", port=0), ServerConfig(host="0.0.0.0", port=0, worker=worker)):
        with pytest.raises(InvalidRequest, match="without authentication"):
            asyncio.run(serve(config, None, None, 0.0))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="without authentication"):
        asyncio.run(run_router(RouterConfig(host="0.0.0.0", port=0, cluster_key="for workers")))
