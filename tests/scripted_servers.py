"""Servers of other kinds, scripted: they check what a router asks of them as real ones would, and answer in kind."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = [" one", " two", " three"]
TICKET = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
          "remote_host": "127.0.0.1", "remote_port": 5600}  # fmt: skip


class Rooms:
    """Where SGLang's two legs meet."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.there: dict[int, set[str]] = {}

    def enter(self, room: int, role: str, seconds: float = 20.0) -> bool:
        """Whether the other came too."""
        with self.changed:
            self.there.setdefault(room, set()).add(role)
            self.changed.notify_all()
            return self.changed.wait_for(lambda: len(self.there[room]) == 2, seconds)


class Scripted:
    def __init__(self, kind: str, role: str, rooms: Rooms | None = None, port: int = 0, model: str = "m") -> None:
        self.kind, self.role, self.rooms = kind, role, rooms
        self.asked: list[dict[str, Any]] = []
        self.ended = 0
        self.fails = False
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": model, "max_model_len": 4096}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                scripted.asked.append(body)
                try:
                    if scripted.fails:
                        self.reply(500, {"error": {"message": "out of order"}})
                    elif (problem := scripted.meet(body)) is not None:
                        self.reply(400, {"error": {"message": problem}})
                    elif body.get("stream"):
                        self.stream()
                    else:
                        more = {"kv_transfer_params": TICKET} if kind == "vllm" and role == "prefill" else {}
                        message = {"role": "assistant", "content": "".join(WORDS)}
                        self.reply(200, {"id": "x", "choices": [{"index": 0, "message": message}], **more})
                except OSError:
                    pass  # nobody listens
                scripted.ended += 1

            def reply(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def stream(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                for word in WORDS:
                    event = {"id": "x", "choices": [{"index": 0, "delta": {"content": word}}]}
                    self.wfile.write(b": ping\n\ndata: %b\n\n" % json.dumps(event).encode())
                self.wfile.write(b"data: [DONE]\n\n")
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def name(self) -> str:
        return f"{self.kind} 127.0.0.1:{self.port}"

    @property
    def option(self) -> str:
        return f"{self.kind}:{self.role}=http://127.0.0.1:{self.port}"

    def meet(self, body: dict[str, Any]) -> str | None:
        """What is wrong with what it is asked."""
        if self.kind == "sglang":
            assert self.rooms is not None
            if (room := body.get("bootstrap_room")) is None or not body.get("bootstrap_host"):
                return "no room"
            return None if self.rooms.enter(room, self.role) else "nobody came"
        params = body.get("kv_transfer_params")
        if self.role == "prefill" and params is not None:
            one = body.get("max_tokens") == 1 and not body.get("stream") and "stream_options" not in body
            return None if params["do_remote_decode"] and one else "not a prefill"
        return None if params in (None, TICKET) else "not a ticket of ours"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
