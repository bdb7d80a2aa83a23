"""FakeWorker: a worker without an engine. It registers, beats and streams like a real one, at a pace, and can be told
to hang, to refuse or to break off: `python -m emberline.cluster.fake --router URL`."""

from __future__ import annotations

import argparse
import asyncio
import socket
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from emberline.cluster.card import Beat, Card, ModelCard
from emberline.cluster.registrar import Registrar

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

EVENT = (
    b'data: {"id":"chatcmpl-fake","object":"chat.completion.chunk","created":1,"model":"fake","choices":'
    b'[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
FINISH = EVENT.replace(b'{"content":" word"}', b"{}").replace(b"null", b'"stop"')
DONE = b"data: [DONE]\n\n"
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


class FakeWorker:
    def __init__(self, name: str, pace: float = 0.0, max_running: int = 64) -> None:
        self.name, self.incarnation = name, uuid.uuid4().hex
        self.pace = pace
        self.max_running = max_running
        self.mode = "well"  # or hang, refuse, full, break (after three events), tear (within the fourth)
        self.asked = self.gone = self.running = self.step = self.prompts = self.generated = 0
        self.seen: list[dict[str, str]] = []  # headers of the last requests

    def card(self, url: str) -> Card:
        return Card(self.name, self.incarnation, url, (ModelCard("fake", "fake", 8192, self.max_running, 65536, 16),))

    def beat(self) -> Beat:
        return Beat(
            self.name,
            self.incarnation,
            running=self.running,
            step=self.step,
            prompt_tokens=self.prompts,
            generated_tokens=self.generated,
            prefix_queries=self.prompts,
        )

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/fake":  # told by a test
            self.mode = msgspec.json.decode(body)["mode"] if body else self.mode
            counts = {name: getattr(self, name) for name in ("asked", "gone", "running", "generated", "seen")}
            return await _reply(send, 200, msgspec.json.encode(counts))
        self.asked += 1
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.seen = [*self.seen[-15:], {**headers, "?": scope["query_string"].decode()}]
        if self.mode in ("refuse", "full"):
            said = b'{"error":{"message":"not now","code":"queue_full"}}'
            status = 503 if self.mode == "refuse" else 429
            return await _reply(send, status, said, [(b"retry-after", b"7")])
        self.running += 1
        leaving = asyncio.create_task(_gone(receive))
        work = asyncio.create_task(self._generate(msgspec.json.decode(body), send))
        try:
            await asyncio.wait((leaving, work), return_when=asyncio.FIRST_COMPLETED)
            self.gone += not work.done()
        finally:
            self.running -= 1
            leaving.cancel()
            work.cancel()
        return None

    async def _generate(self, asked: dict[str, Any], send: Send) -> None:
        if self.mode == "hang":
            await asyncio.Event().wait()
        tokens = asked.get("max_tokens") or 16
        prompt = len(msgspec.json.encode(asked)) // 4
        self.prompts += prompt
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 0}}
        if not asked.get("stream"):
            await asyncio.sleep(self.pace * tokens)
            self._count(tokens)
            message = {"role": "assistant", "content": " word" * tokens}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {"id": "chatcmpl-fake", "object": "chat.completion", "created": 1, "model": "fake"}
            return await _reply(send, 200, msgspec.json.encode({**whole, "choices": [choice], "usage": usage}))
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        for i in range(tokens):
            if i == 3 and self.mode in ("break", "tear"):
                await send(
                    {"type": "http.response.body", "body": EVENT[: 40 * (self.mode == "tear")], "more_body": True}
                )
                raise ConnectionError("as told")
            self._count(1)
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            await asyncio.sleep(self.pace)
        counted = b"data: %b\n\n" % msgspec.json.encode({"choices": [], "usage": usage})
        return await send({"type": "http.response.body", "body": FINISH + counted + DONE})

    def _count(self, tokens: int) -> None:
        self.step += 1
        self.generated += tokens


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _reply(send: Send, status: int, body: bytes, more: list[tuple[bytes, bytes]] | None = None) -> None:
    headers = [*JSON, (b"content-length", str(len(body)).encode()), *(more or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def run(worker: FakeWorker, router: str | None, port: int) -> None:
    import uvicorn

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    registrar = Registrar(router, None, worker.card(url), worker.beat) if router else None
    settings = uvicorn.Config(worker, loop="none", http="httptools", lifespan="off", log_level="critical")

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if registrar is not None:
                await registrar.leave()
            await super().shutdown(sockets)

    if registrar is not None:
        registrar.start()
    await Server(settings).serve([listener])


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(description="A worker without an engine.")
    parser.add_argument("--router")
    parser.add_argument("--name", default="fake")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between two tokens")
    parser.add_argument("--max-running", type=int, default=64)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(FakeWorker(args.name, args.pace, args.max_running), args.router, args.port))


if __name__ == "__main__":
    main()
