"""Failures of clients and of the engine: nothing hangs, nothing leaks, and the server reports the error."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Server, start_server, stop_server

LONG: Any = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "max_tokens": 2000,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server that these tests may damage: small queue, short timeouts, API keys."""
    started = start_server(
        tmp_path_factory.mktemp("own") / "log",
        "--api-key",
        "secret",
        "--api-key",
        "other",
        "--max-running",
        "2",
        "--max-waiting",
        "2",
        "--stall-timeout",
        "5",
        "--embedder",
        "none",
        "--kv-memory",
        "256M",
    )
    yield started
    stop_server(started)


def call(
    server: Server, path: str, body: Any = None, *, raw: bytes | None = None, key: str = "secret", timeout: float = 60
) -> tuple[int, Any, Any]:
    data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(
        server.url + path, data, {"authorization": f"Bearer {key}", "content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, json.loads(reply.read()), reply.headers
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read()), e.headers


def open_stream(server: Server, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    given = {"authorization": "Bearer secret", "content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), given)
    return connection, connection.getresponse()


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.1)


def stats(server: Server) -> dict[str, Any]:
    got: dict[str, Any] = call(server, "/stats")[1]
    return got


def all_free(server: Server) -> bool:
    s = stats(server)
    return bool(
        s["running"] == 0 and s["open_requests"] == 0 and s["blocks_free"] + s["blocks_cached"] == s["blocks_total"]
    )


def engine_pid(server: Server) -> int:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    found = [int(c) for c in children if b"emberline.engine.process" in Path(f"/proc/{c}/cmdline").read_bytes()]
    assert len(found) == 1
    return found[0]


def test_api_key_is_required(own: Server) -> None:
    assert call(own, "/v1/models", key="wrong")[0] == 401
    assert call(own, "/v1/models", key="other")[0] == 200
    assert call(own, "/health/live", key="wrong")[0] == 200


def test_client_disconnect_frees_blocks(own: Server) -> None:
    connection, reply = open_stream(own, LONG)
    assert reply.status == 200 and reply.readline()
    until(lambda: stats(own)["running"] == 1)
    reply.close()
    connection.close()
    until(lambda: all_free(own))


def test_full_queue_is_a_429(own: Server) -> None:
    streams = [open_stream_soon(own) for _ in range(4)]
    until(lambda: stats(own)["running"] + stats(own)["waiting"] == 4)
    status, body, headers = call(own, "/v1/chat/completions", {**LONG, "stream": False})
    assert status == 429 and int(headers["retry-after"]) >= 1 and body["error"]["code"] == "queue_full"
    for stream in streams:
        stream.shutdown(socket.SHUT_RDWR)
        stream.close()
    until(lambda: all_free(own))


def open_stream_soon(server: Server) -> socket.socket:
    """Send the request without waiting for a reply, which queued requests do not have yet."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)))
    body = json.dumps(LONG).encode()
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "host: x",
        "authorization: Bearer secret",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    raw.sendall("\r\n".join((*lines, "", "")).encode() + body)
    return raw


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"model": "smollm2", "messages": "\xff\xfe"}', 400),
        (b"[" * 100_000, 400),
        (b'{"model":"smollm2","messages":[{"role":"user","content":"' + b"a" * (33 << 20) + b'"}]}', 413),
        (json.dumps({"model": "../../etc/passwd", "messages": [{"role": "user", "content": "x"}]}).encode(), 404),
    ],
    ids=["empty", "cut", "utf8", "deep", "huge", "path"],
)
def test_malformed_bodies_are_rejected(own: Server, raw: bytes, status: int) -> None:
    try:
        got, body, _ = call(own, "/v1/chat/completions", raw=raw)
        assert (got, "message" in body["error"]) == (status, True), body
    except (urllib.error.URLError, ConnectionError):
        assert status == 413  # the server answered and closed while we were still sending
    assert call(own, "/health/ready")[0] == 200 and all_free(own)


@pytest.mark.parametrize(
    "limits",
    [
        {"guided_regex": "(((((a{100}){100}){100}){100}){100})"},
        {"guided_regex": "(a+)+" * 2000},
        {"guided_regex": "(?=a)b"},
        {"guided_grammar": "start: start start"},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": {"type": "array", "minItems": 1 << 40}},
        {"guided_json": {"type": "object", "patternProperties": {f"(x{i}|y)*z": {} for i in range(200)}}},
        {"guided_choice": ["x" * 1000] * 5000},
    ],
    ids=["repeats", "nested", "lookahead", "left recursion", "self", "items", "patterns", "choices"],
)
def test_malicious_grammars_are_rejected(own: Server, limits: dict[str, Any]) -> None:
    """The request is served or rejected, and other requests are not affected."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, **limits}
    status, reply, _ = call(own, "/v1/chat/completions", body)
    assert status == 200 or (status == 400 and reply["error"]["message"]), reply
    assert call(own, "/health/ready")[0] == 200 and all_free(own)


def test_unknown_paths_and_methods_are_rejected(own: Server) -> None:
    assert call(own, "/v1/nothing", {})[0] == 404
    assert call(own, "/v1/chat/completions")[0] == 405


def test_engine_death_ends_all_streams_and_restarts(own: Server) -> None:
    restarts = stats(own)["engine_restarts"]
    connection, reply = open_stream(own, LONG)
    reply.readline()
    seen: list[int] = []
    watcher = threading.Thread(
        target=lambda: until(lambda: bool(seen.append(call(own, "/health/ready")[0]) or seen[-1] == 503), 30)
    )
    watcher.start()
    os.kill(engine_pid(own), signal.SIGKILL)
    rest = reply.read().decode()
    assert '"error"' in rest and "engine_failed" in rest
    connection.close()
    watcher.join()
    assert 503 in seen, "/health/ready never reported that the engine was down"
    until(lambda: call(own, "/health/ready")[0] == 200, 90)
    assert stats(own)["engine_restarts"] == restarts + 1
    answer = call(own, "/v1/chat/completions", {**LONG, "stream": False, "max_tokens": 3})
    assert answer[0] == 200 and all_free(own)


def test_engine_that_hangs_is_restarted(own: Server) -> None:
    connection, reply = open_stream(own, LONG)
    reply.readline()
    os.kill(engine_pid(own), signal.SIGSTOP)
    rest = reply.read().decode()  # the stream ends by itself: every wait has a deadline
    assert "engine_failed" in rest
    connection.close()
    until(lambda: call(own, "/health/progress")[0] == 200, 90)


def test_request_timeout_ends_a_request(tmp_path: Path) -> None:
    server = start_server(tmp_path / "log", "--request-timeout", "1", "--embedder", "none", "--kv-memory", "256M")
    try:
        status, body, _ = call(server, "/v1/chat/completions", {**LONG, "stream": False})
        assert status == 504 and body["error"]["code"] == "deadline_exceeded"
        assert all_free(server)
    finally:
        stop_server(server)


def test_model_that_cannot_be_loaded_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(AssertionError) as raised:
        start_server(tmp_path / "log", str(tmp_path / "broken.gguf"))
    assert "emberline: " in str(raised.value) and "Traceback" not in str(raised.value)
