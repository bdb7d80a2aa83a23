"""A fake provider or fake vLLM server with large replies, for `emberline bench event-loop`.

python -m emberline.bench.event_loop_upstream PORT REPLY_BYTES
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
def make_gzip_bomb() -> bytes:
    """Return about 1 MB of gzip data that decompresses to 1 GB of spaces."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(1024)) + packer.flush()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    size = 0  # bytes of the text of a large reply

    def do_GET(self) -> None:
        models = {"data": [{"id": "vllm", "max_model_len": 1 << 20}]}
        self._send_reply(JSON, json.dumps(models).encode())

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith("/bomb"):
            self._send_reply(JSON, make_gzip_bomb(), content_encoding="gzip")
        elif b'"event"' in asked[:200]:
            self._send_reply(EVENTS, self._large_event_stream())
        elif b'"whole"' in asked[:200]:
            self._send_reply(JSON, self._completion_json("message", "stop", self.size))
        else:
            self._send_reply(JSON, self._completion_json("message", "stop", 1))

    def _large_event_stream(self) -> bytes:
        first = self._completion_json("delta", None, self.size)
        return b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % (first, self._completion_json("delta", "stop", 0))

    def _completion_json(self, message_key: str, finish_reason: str | None, text_bytes: int) -> bytes:
        choice = {"index": 0, message_key: {"role": "assistant", "content": "TEXT"}, "finish_reason": finish_reason}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        kind = "chat.completion" if message_key == "message" else "chat.completion.chunk"
        made = {"id": "x", "object": kind, "created": 1, "model": "m", "choices": [choice], "usage": usage}
        return json.dumps(made).encode().replace(b"TEXT", b"word " * (text_bytes // 5))

    def _send_reply(self, content_type: str, body: bytes, content_encoding: str = "") -> None:
        self.send_response(200)
        self.send_header("content-type", content_type)
        if content_encoding:
            self.send_header("content-encoding", content_encoding)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(OSError):  # the client may close the connection early
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    make_gzip_bomb()  # built before the measurement
    _Handler.size = int(sys.argv[2])
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()


if __name__ == "__main__":
    main()
