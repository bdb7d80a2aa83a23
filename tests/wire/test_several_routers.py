"""Several routers as real processes behind a TCP balancer; one of them is killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from routers import get, spawn, start_router, stop, until

from emberline.chaos.resuming_client import ResumedReply, fetch_with_resumption
from emberline.chaos.tcp_balancer import TCPBalancer
from emberline.cluster.fake_completion import FakeCompletion, FakeRequest
from emberline.core.freeport import free_port
from emberline.net.connection_pool import HTTPConnectionPool

CHAT = "/v1/chat/completions"
HEADERS = {"content-type": "application/json"}


class SeveralRouters:
    """Two routers, and three fake workers that are registered with both."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ports = [free_port(), free_port()]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.routers = [self.start_router(i) for i in range(2)]
        options = [word for url in self.urls for word in ("--router", url)]
        self.workers = [
            spawn(home / name, "-m", "emberline.cluster.fake", *options, "--name", name, "--pace", "0.02")
            for name in ("one", "two", "three")
        ]
        for url in self.urls:
            until(lambda url=url: len(self.ready_workers(url)) == 3)  # type: ignore[misc]

    def start_router(self, index: int) -> subprocess.Popen[bytes]:
        return start_router(self.home / f"router-{index}", "--event-ids", port=self.ports[index]).process

    def ready_workers(self, url: str) -> list[dict[str, Any]]:
        return [row for row in get(f"{url}/cluster/status")["workers"] if row["health"] == "ready"]

    def close(self) -> None:
        stop(*self.workers, *self.routers)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeveralRouters]:
    started = SeveralRouters(tmp_path_factory.mktemp("several-routers"))
    yield started
    started.close()


def request(seed: int | None, tokens: int, *, stream: bool = True, uneven: bool = False) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"request {seed} " * 30}]
    fields = {"seed": seed} if seed is not None else {}
    return {"model": "fake", "messages": messages, "max_tokens": tokens, "stream": stream, "uneven": uneven, **fields}


def expected_events(body: dict[str, Any], prompt_tokens: int) -> bytes:
    completion = FakeCompletion(body["seed"], FakeRequest(body["seed"], body["max_tokens"], uneven=body["uneven"]))
    return b"".join(completion.stream_chunks(prompt_tokens, 0, is_tracked=False))


async def send(pool: HTTPConnectionPool, url: str, body: dict[str, Any]) -> ResumedReply:
    data, reply = json.dumps(body).encode(), ResumedReply()
    async with asyncio.timeout(30):
        await fetch_with_resumption(pool, url, CHAT, HEADERS, data, reply)
    assert reply.status == 200, reply.body
    if body["stream"]:
        assert reply.body == expected_events(body, len(data) // 4)
    else:
        completion = FakeCompletion(body["seed"], FakeRequest(body["seed"], body["max_tokens"]))
        assert reply.body == completion.build_body(len(data) // 4)
    return reply


async def kill_router_under_load(cluster: SeveralRouters) -> list[ResumedReply]:
    pool = HTTPConnectionPool(connect_timeout_s=5.0, idle_timeout_s=0.0)
    servers = [("127.0.0.1", port) for port in cluster.ports]
    balancer = await TCPBalancer("127.0.0.1", 0, servers[0], servers=servers).start()
    url = f"http://127.0.0.1:{balancer.port}"
    bodies = [request(i, 40, stream=i % 3 != 2, uneven=i % 2 == 1) for i in range(40)]
    tasks = [asyncio.create_task(send(pool, url, body)) for body in bodies]
    await asyncio.sleep(0.5)
    os.kill(cluster.routers[0].pid, signal.SIGKILL)
    try:
        return await asyncio.gather(*tasks)
    finally:
        balancer.stop()
        pool.close()


def test_streams_of_a_killed_router_continue_at_the_other(cluster: SeveralRouters) -> None:
    """Every request gets exactly the events of an undisturbed run, and the workers' requests end."""
    replies = asyncio.run(kill_router_under_load(cluster))
    assert sum(reply.resumptions for reply in replies) >= 5 and sum(reply.repetitions for reply in replies) >= 2
    cluster.routers[0].wait()
    status = get(f"{cluster.urls[1]}/cluster/status")
    assert status["broken"] == 0 and not status["retries"]
    for row in status["workers"]:
        until(lambda name=row["name"]: _row(cluster.urls[1], name)["running"] == 0, 10)  # type: ignore[misc]
    cluster.routers[0] = cluster.start_router(0)
    until(lambda: len(cluster.ready_workers(cluster.urls[0])) == 3)


def _row(url: str, name: str) -> dict[str, Any]:
    return next(row for row in get(f"{url}/cluster/status")["workers"] if row["name"] == name)


def read_events(cluster: SeveralRouters, router: int, body: dict[str, Any], last_id: str = "") -> list[str]:
    text: str = get(f"{cluster.urls[router]}{CHAT}", body, {"last-event-id": last_id} if last_id else {})
    return text.split("\n\n")[:-1]


@pytest.mark.parametrize("seed", [7, None])
def test_stream_continues_after_any_event(cluster: SeveralRouters, seed: int | None) -> None:
    """Also in the middle of a group of events, and with a seed that the first router chose."""
    body = request(seed, 12, uneven=True)
    events = read_events(cluster, 0, body)
    ids = [event.rpartition("\nid: ")[2] for event in events]
    assert len(set(ids)) == len(events) >= 14

    def without_ids(lines: list[str]) -> list[str]:
        return [line.rpartition("\nid: ")[0] for line in lines]

    for i in range(len(events)):
        assert without_ids(read_events(cluster, 1, body, ids[i])) == without_ids(events[i + 1 :])


def test_load_at_other_router_is_seen(cluster: SeveralRouters) -> None:
    command = ["curl", "-sN", "-o", os.devnull, "-d", json.dumps(request(3, 150)), f"{cluster.urls[0]}{CHAT}"]
    client = subprocess.Popen([*command, "-H", "content-type: application/json"])
    try:
        until(lambda: sum(row["open_by_other_routers"] for row in cluster.ready_workers(cluster.urls[1])) == 1, 10)
        assert sum(row["open"] for row in cluster.ready_workers(cluster.urls[1])) == 0
    finally:
        client.kill()
        client.wait()
    until(lambda: sum(row["open_by_other_routers"] for row in cluster.ready_workers(cluster.urls[1])) == 0, 10)


def test_streams_that_cannot_continue(cluster: SeveralRouters) -> None:
    body = request(9, 4)
    last_id = read_events(cluster, 0, body)[0].rpartition("\nid: ")[2]
    gone = "f" * 32 + last_id[32:]
    for other, given, status, text in (
        (body, "17", 400, "no event id of this service"),
        (body, gone, 410, "is gone"),
        ({**body, "max_tokens": 5}, last_id, 410, "does not have the stream"),
        (body, last_id[:-3] + "9.1", 410, "does not have the stream"),
    ):
        with pytest.raises(urllib.error.HTTPError) as error:
            read_events(cluster, 1, other, given)
        assert error.value.code == status and text in error.value.read().decode()


async def worker_of_turn(pool: HTTPConnectionPool, url: str, messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": "fake", "messages": messages, "max_tokens": 3, "seed": 1}).encode()
    async with asyncio.timeout(30):
        reply = await pool.fetch("POST", f"{url}{CHAT}", HEADERS, body)
    assert reply.status == 200
    return reply.headers["x-emberline-worker"]


async def count_turns_at_their_worker(cluster: SeveralRouters, name: str, urls: list[str]) -> int:
    """Return how many second and third turns of 16 conversations went to the worker of the first turn."""
    pool = HTTPConnectionPool(connect_timeout_s=5.0, idle_timeout_s=0.0)
    talks = [[{"role": "user", "content": f"{name} {i} " * 60}] for i in range(16)]
    workers: list[list[str]] = []
    for turn in range(3):
        if turn:
            await asyncio.sleep(2.5)  # heartbeats carry what the routers know
        sent = [worker_of_turn(pool, urls[(i + turn) % len(urls)], talk) for i, talk in enumerate(talks)]
        workers.append(list(await asyncio.gather(*sent)))
        for talk in talks:
            talk += [{"role": "assistant", "content": "so"}, {"role": "user", "content": f"turn {turn} " * 9}]
    pool.close()
    return sum(later == first for turn in workers[1:] for first, later in zip(workers[0], turn, strict=True))


def test_conversations_keep_their_worker_at_any_router(cluster: SeveralRouters) -> None:
    async def main() -> list[int]:
        one, several = cluster.urls[:1], cluster.urls
        return await asyncio.gather(
            count_turns_at_their_worker(cluster, "one", one), count_turns_at_their_worker(cluster, "several", several)
        )

    with_one, with_two = asyncio.run(main())
    assert with_two >= 0.9 * with_one > 16


def test_openai_client_ignores_event_ids(cluster: SeveralRouters) -> None:
    with openai.OpenAI(base_url=f"{cluster.urls[0]}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "why"}]
        stream = client.chat.completions.create(model="fake", messages=messages, max_tokens=6, seed=5, stream=True)  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    completion = FakeCompletion(5, FakeRequest(5, 6))
    assert text == "".join(map(completion.text_at, range(6)))
