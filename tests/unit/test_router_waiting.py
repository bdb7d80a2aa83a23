"""Requests that wait at a router without workers, and the latencies that the router measures for the autoscaler."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from local_router import LocalRouter

from emberline.cluster.registration import Heartbeat
from emberline.core.config import RouterConfig
from emberline.router.http import expected_models
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


async def exchange(router: LocalRouter, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(request)
    reply = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return reply


async def get(router: LocalRouter, path: str) -> bytes:
    return await exchange(router, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())


async def fetch_status(router: LocalRouter) -> dict[str, Any]:
    reply = await get(router, "/cluster/status")
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
    data = json.dumps(body).encode()
    head = HEAD.replace(b"/v1/chat/completions", path.encode())
    reply = await exchange(router, b"%bcontent-length: %d\r\n\r\n%b" % (head, len(data), data))
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
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

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


async def chat(router: LocalRouter, model: str) -> bytes:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    return await exchange(router, HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))


def test_a_request_for_an_announced_model_waits_for_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_models, "START_GRACE_S", 0.0)

    async def run() -> None:
        router = await LocalRouter(RouterConfig(migration_wait=1.0)).start()
        dispatcher = router.app.dispatcher
        await router.add_worker("w", answer)
        assert (await chat(router, "late")).startswith(b"HTTP/1.1 404")
        assert await post(router, "/cluster/models", {"models": ["late"], "seconds": 30}) == (200, {})
        waiting = asyncio.create_task(chat(router, "late"))
        await asyncio.sleep(0.2)
        status = await fetch_status(router)
        assert status["waiting_by_model"] == {"late": 1} and status["waiting_requests"] == 1
        listed = json.loads((await get(router, "/v1/models")).partition(b"\r\n\r\n")[2])
        assert [model["id"] for model in listed["data"]] == ["late", "m"]
        await router.add_worker("late", answer, model="late")
        reply = await waiting
        assert reply.startswith(b"HTTP/1.1 200") and reply.count(EVENT) == 5, reply
        # Without a worker the wait ends, with a typed error.
        dispatcher.mark_leaving("late", "ilate")
        dispatcher.workers.pop("late")
        reply = await chat(router, "late")
        assert reply.startswith(b"HTTP/1.1 503") and b"'late' has no worker yet" in reply, reply
        assert (await fetch_status(router))["waiting_by_model"] == {}
        # An autoscaler that is gone announces nothing any more.
        await post(router, "/cluster/models", {"models": ["late"], "seconds": 0.01})
        await asyncio.sleep(0.02)
        assert (await chat(router, "late")).startswith(b"HTTP/1.1 404")
        for invalid in ({"models": ["x"] * 1025, "seconds": 1}, {"models": ["x"], "seconds": 0}):
            assert (await post(router, "/cluster/models", invalid))[0] == 400
        await router.stop()

    asyncio.run(run())


def test_a_router_that_has_just_started_expects_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_models, "START_GRACE_S", 0.5)

    async def run() -> None:
        router = await LocalRouter().start()
        await router.add_worker("w", answer)
        first, second = (asyncio.create_task(chat(router, model)) for model in ("late", "wrong"))
        await asyncio.sleep(0.2)
        await router.add_worker("late", answer, model="late")
        assert (await first).startswith(b"HTTP/1.1 200")
        assert (await second).startswith(b"HTTP/1.1 404")
        await router.stop()

    asyncio.run(run())
