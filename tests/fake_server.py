"""FakeServer: our wire without an engine. What it answers is scripted by words in the last user message, so that
clients (the playground, `emberline chat`) can be shown every ending, the rare ones too."""

from __future__ import annotations

import json
import mimetypes
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ANSWER = """The prefix cache keeps the keys and values of **finished blocks**, named by a hash of their tokens.

A second turn that begins with the same tokens finds them again, so only the *new* part is computed:

```python
def lookup(self, hashes: list[bytes]) -> int:
    hit = 0  # blocks found, in order
    for name in hashes:
        if name not in self.blocks:
            break
        hit += 1
    return hit
```

- first turn: everything is computed
- second turn: `cached_tokens` is above zero
"""
HOSTILE = (
    '<script>window.hacked=1</script><img src=x onerror="window.hacked=1"> [click](javascript:window.hacked=1)\n\n'
    "```html\n<script>window.hacked=1</script>\n```\n\n# <svg onload=window.hacked=1>\n\n- <b>bold?</b>\n"
)
ESCAPES = "a\x1b]0;owned\x07 title and \x1b[2J a wiped screen"
REFUSALS = {  # word: status, code, message
    "fail-400": (400, "invalid_value", "temperature is 9; it must be in [0, 2]"),
    "fail-401": (401, "invalid_api_key", "this server wants an API key"),
    "fail-429": (429, "queue_full", "the queue is full: 64 requests wait"),
    "fail-503": (503, "engine_unavailable", "the engine is restarting"),
}


class FakeServer:
    def __init__(self, web: Path | None = None, *, token_seconds: float = 0.0) -> None:
        self.web = web
        self.token_seconds = token_seconds
        self.requests: list[dict[str, Any]] = []  # bodies of chat completions, in order
        self.models: list[dict[str, Any]] = [{"id": "fake", "object": "model", "owned_by": "emberline", "kind": "chat"}]
        self.admin_key = ""  # of the endpoints that change the models; "": they are off
        self.cached = [{"name": "hf:org/large-GGUF/large-q4_0.gguf", "bytes": 2_000_000_000, "changed": 0}]
        self.gone = 0  # clients that left before their answer ended
        self.seen = 0  # characters of history already "cached"
        self.counters = {"generated_tokens": 0, "prompt_tokens": 0, "prefix_queries": 0, "prefix_hits": 0, "step": 0}
        self.running = 0
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._http.serve_forever, daemon=True, kwargs={"poll_interval": 0.05}).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def stats(self) -> dict[str, Any]:
        used = 40 * self.running
        return self.counters | {
            "running": self.running, "waiting": 0, "kv_usage": used / 512, "blocks_total": 512, "preemptions": 0,
            "blocks_free": 512 - used - 90, "blocks_cached": 90, "model": "fake", "uptime_seconds": time.monotonic(),
            "engine_state": "ready", "engine_restarts": 0, "dashboard": "http://127.0.0.1:8080",
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self._send(200, {"object": "list", "data": self.fake.models})
        if self.path == "/api/tags":
            sizes = [
                {"name": f"{each['id']}:latest", "details": {"parameter_size": "7.0B"}} for each in self.fake.models
            ]
            return self._send(200, {"models": sizes})
        if self.path == "/admin/models":
            return self._list_models() if self._is_admin() else None
        if self.path == "/stats":
            return self._send(200, self.fake.stats())
        name = "index.html" if self.path == "/" else self.path.removeprefix("/static/")
        file = self.fake.web / name if self.fake.web else None
        if file is None or "/" in name or not file.is_file():
            return self._refuse(404, "not_found", f"no {self.path} here")
        return self._send(200, file.read_bytes(), mimetypes.guess_type(name)[0] or "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/admin/models/"):
            return self._change_model(self.path.rpartition("/")[2], body["model"]) if self._is_admin() else None
        self.fake.requests.append(body)
        words = str(body["messages"][-1]["content"]).splitlines()[-1].split()
        for word in words:
            if word in REFUSALS:
                return self._refuse(*REFUSALS[word])
        return self._generate(body, words)

    # -- models at run time

    def _is_admin(self) -> bool:
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self.fake.admin_key:
            self._refuse(403, "forbidden", "this server has no admin key")
        elif key != self.fake.admin_key:
            self._refuse(401, "invalid_api_key", "the admin key is missing or wrong")
        return bool(self.fake.admin_key) and key == self.fake.admin_key

    def _list_models(self) -> None:
        served = [
            {"name": each["id"], "source": each["id"], "can_unload": i > 0, "open_requests": 0, "context": 4096}
            for i, each in enumerate(self.fake.models)
        ]
        facts = {"context": 40960, "licence": "Apache-2.0"}
        catalogue = [
            {"name": "small", "source": "hf:org/small", "parameters": 6e8, "download_bytes": 6e8, "gpu_bytes": 1.2e9},
            {
                "name": "large",
                "source": "hf:org/large-GGUF:Q4_0",
                "parameters": 3e10,
                "download_bytes": 18e9,
                "gpu_bytes": 6e10,
            },
        ]
        body = {"served": served, "cached": self.fake.cached, "pulling": [], "available_bytes": 9_000_000_000}
        self._send(200, body | {"catalogue": [each | facts for each in catalogue]})

    def _change_model(self, action: str, name: str) -> None:
        if action == "unload":
            self.fake.models = [each for each in self.fake.models if each["id"] != name]
        elif action == "remove":
            self.fake.cached = [each for each in self.fake.cached if each["name"] != name]
        else:
            lines = [{"status": f"pulling {name}", "total": 100, "completed": done} for done in (10, 100)]
            if name == "missing":
                lines.append({"error": {"message": "no such model on the hub", "code": "download_error"}})
            else:
                self.fake.models.append({"id": name, "object": "model", "owned_by": "emberline", "kind": "chat"})
                lines.append({"status": "success"})
            data = "".join(json.dumps(line) + "\n" for line in lines)
            return self._send(200, data.encode(), "application/x-ndjson")
        return self._send(200, {"status": "success"})

    def _generate(self, body: dict[str, Any], words: list[str]) -> None:
        self.fake.running += 1
        try:
            self._stream(body, words)
        except (BrokenPipeError, ConnectionResetError):
            self.fake.gone += 1
            self.close_connection = True
        finally:
            self.fake.running -= 1

    def _stream(self, body: dict[str, Any], words: list[str]) -> None:
        history = sum(len(str(m["content"])) for m in body["messages"]) // 4 + 8
        cached = min(self.fake.seen, history) // 16 * 16
        self._count(prompt_tokens=history - cached, prefix_queries=history, prefix_hits=cached)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        text = {"hostile": HOSTILE, "escapes": ESCAPES, "forever": ANSWER * 40}.get(words[0], ANSWER)
        last = body["messages"][-1]
        if last["role"] == "tool":
            text = f"The result is {last['content']}."
        elif "call" in words:
            call = {"index": 0, "id": "c1", "function": {"name": words[1], "arguments": words[2]}}
            self._event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
            text = ""
        elif "json" in words:
            text = '{"n": [1, 2]}'
        pieces = [text[i : i + 4] for i in range(0, len(text), 4)][: body.get("max_tokens")]
        if "think" in words:
            for piece in ("They ask ", "about the ", "prefix cache."):
                self._event({"choices": [{"index": 0, "delta": {"reasoning_content": piece}}]})
        for i, piece in enumerate(pieces):
            if i == 12 and "fail-drop" in words:
                time.sleep(0.3)  # what arrives together with the end of a connection may be lost with it
                return
            if i == 12 and "fail-engine" in words:
                self._event({"error": {"message": "the engine died; it is being restarted", "code": "engine_failed"}})
                break
            self._event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
            self._count(generated_tokens=1, step=1)
            time.sleep(self.fake.token_seconds)
        else:
            reason = "length" if len(pieces) == body.get("max_tokens") else "stop"
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
            usage: dict[str, Any] = {"prompt_tokens": history, "completion_tokens": len(pieces)}
            drafts = (3, 1) if "drafts" in words else (0, 0)
            names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
            usage["completion_tokens_details"] = dict(zip(names, drafts, strict=True))
            self._event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}})
            self.fake.seen = history + len(pieces)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def end_headers(self) -> None:
        self.send_header("Connection", "close")  # a server that has gone must not live on in kept connections
        super().end_headers()

    def _count(self, **increments: int) -> None:
        for name, amount in increments.items():
            self.fake.counters[name] += amount

    def _event(self, chunk: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(chunk | {"object": "chat.completion.chunk"}).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _refuse(self, status: int, code: str, message: str) -> None:
        error = {"message": message, "code": code, "param": "temperature" if status == 400 else None}
        self._send(status, {"error": error}, wait="7" if status == 429 else None)

    def _send(self, status: int, body: Any, kind: str = "application/json", wait: str | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if wait:
            self.send_header("Retry-After", wait)
        self.end_headers()
        self.wfile.write(data)
