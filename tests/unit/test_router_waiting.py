"""Requests that wait at a router without workers, and the latencies that the router measures for the autoscaler."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from local_router import LocalRouter

from emberline.cluster.registration import Heartbeat
from emberline.router.request_summary import RequestSummary
from emberline.router.worker import RequestLoad

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


async def post(router: LocalRouter, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    reply = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return int(reply.split()[1]), json.loads(reply.partition(b"\r\n\r\n")[2])


def test_a_request_goes_to_a_sleeping_worker_only_if_no_other_takes_it() -> None:
    async def run() -> None:
        router = await LocalRouter().start()
        await router.add_worker("awake", answer)
        await router.add_worker("asleep", answer)
        dispatcher, summary = router.app.dispatcher, RequestSummary.parse(BODY, None, "")
        summary = dispatcher.fill_in_default_model(summary)

        def choose() -> str:
            return dispatcher.choose_worker(summary, set()).worker.name

        dispatcher.record_heartbeat(Heartbeat("asleep", "iasleep", asleep=True))
        dispatcher.workers["awake"].add_request(1, RequestLoad(9e9, 9e9), 0.0)  # busy, but not full
        assert choose() == "awake"
        dispatcher.set_draining("awake", True)
        assert choose() == "asleep"
        dispatcher.set_draining("awake", False)
        assert choose() == "asleep"  # it wakes now
        await router.stop()

    asyncio.run(run())


def test_the_router_passes_the_order_to_sleep_on() -> None:
    orders: list[bytes] = []

    async def take_order(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        orders.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0] + await reader.read(20))
        status = b"200 OK" if len(orders) == 1 else b"400 Bad Request"
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n{}")

    async def run() -> None:
        router = await LocalRouter().start()
        await router.add_worker("w", take_order)
        asyncio.get_running_loop().call_later(
            0.1, lambda: router.app.dispatcher.record_heartbeat(Heartbeat("w", "iw", asleep=True))
        )
        assert await post(router, "/cluster/sleep", {"name": "w"}) == (200, {})
        assert (await fetch_status(router))["workers"][0]["asleep"]
        status, body = await post(router, "/cluster/sleep", {"name": "w", "on": False})
        assert status == 400 and "--can-sleep" in body["error"]["message"]
        assert (await post(router, "/cluster/sleep", {"name": "x"}))[0] == 404
        assert [order.split(b" ")[1:] for order in orders] == [
            [b"/cluster/sleep", b'HTTP/1.1{"on":true}'],
            [b"/cluster/sleep", b'HTTP/1.1{"on":false}'],
        ]
        await router.stop()

    asyncio.run(run())
