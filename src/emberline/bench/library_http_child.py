"""One HTTP server in a process of its own, for `emberline.bench.library_http`: ours, or uvicorn with httptools.

It prints its port as a line of JSON and serves until it is killed. GET /usage returns its CPU time and memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from emberline.net.server_state import App, Message, Receive, Send

REPLY = json.dumps({"id": "chatcmpl-0", "choices": [{"message": {"content": "x" * 200}}]}).encode()
EVENT = b"data: " + json.dumps({"id": "chatcmpl-0", "choices": [{"delta": {"content": " word"}}]}).encode() + b"\n\n"
EVENTS_PER_STREAM = 200
LARGE_REPLY_PARTS, LARGE_PART_BYTES = 256, 1 << 18
JSON_TYPE = (b"content-type", b"application/json")

open_large_replies = 0


async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    message: Message = {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
    match scope["path"]:
        case "/stream":
            await _send_stream(send)
        case "/large":
            await _send_large(send)
        case "/usage":
            await _send_json(send, json.dumps(_usage()).encode())
        case "/header-names":
            await _send_json(send, json.dumps([name.decode() for name, _ in scope["headers"]]).encode())
        case "/split":
            await _send_json(send, REPLY, (b"x-name", b"a\r\nx-injected: b"))
        case _:
            await _send_json(send, REPLY)


async def _send_json(send: Send, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    sized = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [JSON_TYPE, sized, *headers]})
    await send({"type": "http.response.body", "body": body})


async def _send_stream(send: Send) -> None:
    kind = (b"content-type", b"text/event-stream")
    await send({"type": "http.response.start", "status": 200, "headers": [kind]})
    for _ in range(EVENTS_PER_STREAM):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0)  # as if each event came from the engine alone
    await send({"type": "http.response.body", "body": b""})


async def _send_large(send: Send) -> None:
    global open_large_replies
    open_large_replies += 1
    try:
        await send({"type": "http.response.start", "status": 200, "headers": [JSON_TYPE]})
        for _ in range(LARGE_REPLY_PARTS):
            await send({"type": "http.response.body", "body": b"x" * LARGE_PART_BYTES, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        open_large_replies -= 1


def _usage() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "cpu_s": time.process_time(),
        "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "open_large_replies": open_large_replies,
    }


async def _serve_ours(app: App, listener: socket.socket) -> None:
    from emberline.net.server import HTTPServer

    await HTTPServer(app).start(listener)
    await asyncio.Event().wait()


async def _serve_uvicorn(app: App, listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def main() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    serve = _serve_ours if sys.argv[1] == "ours" else _serve_uvicorn
    uvloop.run(serve(app, listener))


if __name__ == "__main__":
    main()
