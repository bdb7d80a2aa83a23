"""A scripted OpenTelemetry collector."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any


class TraceCollector(http.server.ThreadingHTTPServer):
    """Accepts all traces; the statuses in `script` are returned first, one per request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[int] = []
        self.got: list[tuple[str, dict[str, str], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[dict[str, Any]]:
        """The spans in the order of their arrival, each with the name of its service."""
        found = []
        for _, _, body in list(self.got):
            for each in body["resourceSpans"]:
                service = about(each["resource"])["service.name"]
                found += [span | {"service": service} for scope in each["scopeSpans"] for span in scope["spans"]]
        return found


class Handler(http.server.BaseHTTPRequestHandler):
    server: TraceCollector
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = self.server.script.pop(0) if self.server.script else 200
        if status == 200:
            self.server.got.append((self.path, dict(self.headers), body))
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def about(told: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span, a resource or an event."""
    kinds = {"intValue": int, "stringValue": str, "doubleValue": float, "boolValue": bool}
    return {each["key"]: kinds[kind](value) for each in told["attributes"] for kind, value in each["value"].items()}
