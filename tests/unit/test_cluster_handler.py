"""A worker's endpoints for routers: access, errors, and prefill for another worker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from scripted_engine import WorkerHarness

from emberline.core.config import ServerConfig
from emberline.core.errors import EngineFailed, EngineUnavailable, Overloaded
from emberline.worker.engine_app import EngineApp

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "why"}], "stream": True}
TICKET = {"id": "abc", "peer": {"name": "p"}, "blocks": [1, 2]}
RESUME, PREFILL = "/cluster/resume", "/cluster/prefill"


def make_worker(**settings: Any) -> WorkerHarness:
    return WorkerHarness(lambda before, index: before + "Because.", **settings)


def forwarded(body: Any = CHAT, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    return {"path": path, "body": body, "seed": 1, "handoff": {}, "timeout": 9.0, **fields}


@pytest.mark.parametrize("path", [RESUME, PREFILL])
def test_cluster_endpoints_require_cluster_key(path: str) -> None:
    cluster_key = {"authorization": "Bearer secret"}
    for settings, client, headers, status in (
        ({}, "127.0.0.1", {}, 200),
        ({}, "::1", {}, 200),
        ({}, "::ffff:127.0.0.1", {}, 200),
        ({}, "10.0.0.7", {}, 403),
        ({}, "", {}, 403),
        ({}, "127.0.0.1", {"origin": "http://evil"}, 403),
        ({}, "127.0.0.1", {"x-forwarded-for": "127.0.0.1"}, 403),
        ({}, "127.0.0.1", {"via": "1.1 emberline-gateway"}, 403),
        ({}, "127.0.0.1", {"forwarded": "for=127.0.0.1"}, 403),
        ({"cluster_key": "secret"}, "10.0.0.7", cluster_key, 200),
        ({"cluster_key": "secret"}, "127.0.0.1", {}, 401),
        ({"cluster_key": "secret"}, "127.0.0.1", {"authorization": "Bearer wrong"}, 401),
        ({"cluster_key": "new", "other_cluster_keys": ("secret",)}, "10.0.0.7", cluster_key, 200),
        ({"cluster_key": "new", "other_cluster_keys": ("old",)}, "10.0.0.7", cluster_key, 401),
        ({"cluster_key": "secret"}, "10.0.0.7", {**cluster_key, "origin": "http://evil"}, 403),
        ({"cluster_key": "secret"}, "10.0.0.7", {**cluster_key, "via": "1.1 emberline-gateway"}, 403),
    ):
        worker = make_worker(**settings)
        answer = asyncio.run(worker.post_async(path, forwarded(), client=client, **headers))
        assert answer.status == status and bool(worker.engine.submissions) == (status == 200)


def test_server_without_router_has_no_cluster_endpoints() -> None:
    worker = make_worker()
    alone = ServerConfig(models={"m": "m"}, embedder=None)
    worker.app = EngineApp(alone, worker.app.engine, worker.catalog, None, {})
    assert worker.post(RESUME, forwarded()).status == worker.post(PREFILL, forwarded()).status == 404


@pytest.mark.parametrize("call", [RESUME, PREFILL])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 200}'),
        ("/v1/chat/completions", b'{"model": "m", "messages": [] }'),
        ("/v1/chat/completions", b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}'),
        ("/v1/completions", json.dumps({"model": "m", "prompt": "x" * 5000}).encode()),
        ("/v1/messages", b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'),
        ("/v1/messages", b'{"model": "other", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}'),
        ("/v1/responses", b'{"model": "m", "input": 7}'),
    ],
)
def test_invalid_call_gets_error_in_client_protocol(call: str, path: str, body: bytes) -> None:
    worker = make_worker()
    direct = worker.post(path, body)
    wrapped = b'{"path": "%b", "seed": 1, "handoff": {}, "timeout": 5, "body": %b}' % (path.encode(), body)
    again = worker.post(call, wrapped)
    assert direct.status in (400, 404) and (again.status, again.body) == (direct.status, direct.body)


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "/v1/embeddings"},
        {"path": 7},
        {"seed": "x"},
        {"seed": -1 << 70},
        {"handoff": {"said": [[0, [-1]]]}},
        {"handoff": {"said": [[0, [1], "maybe"]]}},
        {"handoff": {"said": [[3, [1]]]}},
        {"handoff": {"said": [[0, [99999]]]}},
        {"handoff": {"source": 7}},
        {"handoff": []},
    ],
)
def test_invalid_forwarded_request_is_rejected(wrong: dict[str, Any]) -> None:
    worker = make_worker()
    answer = worker.post(RESUME, forwarded() | wrong)
    assert answer.status == 400 and answer.json["error"]["code"] == "invalid_value"
    assert not worker.engine.submissions


def test_kv_source_reaches_engine() -> None:
    worker = make_worker()
    assert worker.post(RESUME, forwarded(handoff={"source": TICKET})).status == 200
    assert worker.engine.submissions[0].source == TICKET and not worker.engine.submissions[0].publish


def test_prefill_for_another_worker() -> None:
    worker = make_worker()
    worker.engine.ticket = TICKET
    answer = worker.post(PREFILL, forwarded())
    assert answer.status == 200 and answer.headers["content-type"] == "application/x-ndjson" and answer.ended
    ticket, done = map(json.loads, answer.body.splitlines())
    first = worker.tokenizer.encode("B", add_special=False)[0]
    assert ticket == {"ticket": TICKET} and done == {"done": {"token": first, "cached": 3, "seconds": 0.5}}
    assert answer.writes[0].count(b"\n") == 1  # sent before the prompt is computed
    submission = worker.engine.submissions[0]
    assert submission.publish and submission.params.seed == 1 and 8.9 < submission.timeout <= 9.0


def test_short_prompt_has_no_ticket() -> None:
    assert list(make_worker().post(PREFILL, forwarded()).json) == ["done"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 2}),
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"]}),
        ("/v1/completions", {"model": "m", "prompt": "a", "echo": True}),
    ],
)
def test_prefill_rejects_several_choices(path: str, body: dict[str, Any]) -> None:
    worker = make_worker()
    assert worker.post(PREFILL, forwarded(body, path)).status == 400 and not worker.engine.submissions


def test_failed_prefill_reports_error() -> None:
    """An error before the first line has a status, a later one is a line."""
    for error, after, status in ((Overloaded("full"), 0, 429), (EngineUnavailable("starting"), 0, 503)):
        worker = make_worker()
        worker.engine.fail_after, worker.engine.error = after, error
        assert worker.post(PREFILL, forwarded()).status == status
    worker = make_worker()
    worker.engine.ticket, worker.engine.fail_after, worker.engine.error = TICKET, 1, EngineFailed("it died")
    answer = worker.post(PREFILL, forwarded())
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert answer.status == 200 and answer.ended and [list(line) for line in lines] == [["ticket"], ["error"]]
    assert lines[1]["error"] == {"code": "engine_failed", "message": "it died", "status": 500}
