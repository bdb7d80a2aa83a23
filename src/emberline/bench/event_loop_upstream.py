"""A provider and a vLLM server with large replies, for `emberline bench event-loop`.

python -m emberline.bench.event_loop_upstream PORT SIZE
"""

from __future__ import annotations

import http.server
import json
import sys
import zlib
from contextlib import suppress
from functools import cache

JSON, EVENTS = "application/json", "text/event-stream"


@cache
def packed_spaces() -> bytes:
    """Return 1 GB of spaces as 1 MB of gzip."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(1024)) + packer.flush()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    size = 0  # bytes of the text of a large reply

    def do_GET(self) -> None:
        models = {"data": [{"id": "vllm", "max_model_len": 1 << 20}]}
        self._reply(JSON, json.dumps(models).encode())

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith("/bomb"):
            self._reply(JSON, packed_spaces(), coding="gzip")
        elif b'"event"' in asked[:200]:
            self._reply(EVENTS, self._event())
        elif b'"whole"' in asked[:200]:
            self._reply(JSON, self._completion("message", "stop", self.size))
        else:
            self._reply(JSON, self._completion("message", "stop", 1))

    def _event(self) -> bytes:
        first = self._completion("delta", None, self.size)
        return b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % (first, self._completion("delta", "stop", 0))

    def _completion(self, part: str, finish: str | None, size: int) -> bytes:
        choice = {"index": 0, part: {"role": "assistant", "content": "TEXT"}, "finish_reason": finish}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        kind = "chat.completion" if part == "message" else "chat.completion.chunk"
        made = {"id": "x", "object": kind, "created": 1, "model": "m", "choices": [choice], "usage": usage}
        return json.dumps(made).encode().replace(b"TEXT", b"word " * (size // 5))

    def _reply(self, kind: str, body: bytes, coding: str = "") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        if coding:
            self.send_header("content-encoding", coding)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(OSError):  # the client may close the connection early
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    packed_spaces()  # built before the measurement
    _Handler.size = int(sys.argv[2])
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()


if __name__ == "__main__":
    main()
