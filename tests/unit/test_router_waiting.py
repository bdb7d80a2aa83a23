"""Requests that wait at a router without workers, and the latencies that the router measures for the autoscaler."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from local_router import LocalRouter

BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()  # without a model
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
REPLY_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(REPLY_HEAD + EVENT)
    for _ in range(4):
        await asyncio.sleep(0.02)
        writer.write(EVENT)
    writer.write(b"data: [DONE]\n\n")
    writer.close()


async def fetch_status(router: LocalRouter) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"GET /cluster/status HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    reply = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    status: dict[str, Any] = json.loads(reply.partition(b"\r\n\r\n")[2])
    return status


def test_a_request_without_a_model_waits_for_the_first_worker() -> None:
    async def run() -> None:
        router = await LocalRouter().start()
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(HEAD + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY))
        await asyncio.sleep(0.3)
        status = await fetch_status(router)
        assert status["waiting_requests"] == 1 and not status["workers"]
        await router.add_worker("w", answer)
        reply = await asyncio.wait_for(reader.read(), 10)
        assert reply.startswith(b"HTTP/1.1 200") and reply.count(EVENT) == 5, reply
        status = await fetch_status(router)
        latency = status["latency"]
        assert status["waiting_requests"] == 0 and sum(latency["first_token"]) == 1
        slowest = max(i for i, count in enumerate(latency["first_token"]) if count)
        assert latency["bounds_s"][slowest] > 0.3  # the time without a worker counts
        assert sum(latency["inter_token"]) >= 4
        await router.stop()

    asyncio.run(run())
