"""A status that is not a router's does not end the autoscaler, nor does one of a router of another release."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from local_router import LocalRouter
from scaled_cluster import make_row

from emberline.autoscaler.observer import StatusObserver
from emberline.autoscaler.router_client import RouterClient, RouterUnavailable
from emberline.autoscaler.router_status import find_status_problem
from emberline.autoscaler.status_merger import StatusMerger

ROW: dict[str, Any] = make_row("w")
STATUS: dict[str, Any] = {
    "workers": [ROW],
    "waiting_requests": 0,
    "refused": 0,
    "latency": {"bounds_s": [1.0], "first_token": [0, 0], "inter_token": [0, 0]},
}


async def fetch(router: LocalRouter) -> dict[str, Any]:
    client = RouterClient(f"http://127.0.0.1:{router.port}", None)
    try:
        return await client.fetch_status()
    finally:
        client.close()


def test_status_of_a_real_router_is_accepted() -> None:
    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def main() -> None:
        router = await LocalRouter().start()
        try:
            await router.add_worker("w", ignore)
            assert [row["name"] for row in (await fetch(router))["workers"]] == ["w"]
        finally:
            await router.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 5},
        {"workers": [{}]},
        {"workers": ["x"]},
        {"workers": [{**ROW, "health": "weird"}]},
        {"workers": [{**ROW, "answered": None}]},
        {"workers": [{**ROW, "open": "9"}]},
        {"workers": [{**ROW, "open": -5}]},
        {"workers": [{**ROW, "open": 10**300}]},
        {"workers": [{**ROW, "name": 5}]},
        {"workers": [{**ROW, "models": 5}]},
        {"latency": None},
        {"latency": {"bounds_s": [1.0], "first_token": [0], "inter_token": [0, 0]}},
        {"refused": "x"},
        {"waiting_requests": None},
        {"waiting_by_model": [1]},
    ],
    ids=lambda changes: json.dumps(changes)[-60:],
)
def test_malformed_status_is_a_router_that_does_not_answer(changes: dict[str, Any]) -> None:
    assert find_status_problem(STATUS) == ""
    assert find_status_problem({**STATUS, **changes})
    assert find_status_problem({name: value for name, value in STATUS.items() if name not in changes}) or (
        "waiting_by_model" in changes
    )

    class Client(RouterClient):
        async def _call(self, method: str, path: str, body: bytes, timeout_s: float) -> tuple[int, Any]:
            return 200, msgspec.json.decode(json.dumps({**STATUS, **changes}))

    async def fetch_malformed() -> None:
        await Client("http://127.0.0.1:9", None).fetch_status()

    with pytest.raises(RouterUnavailable, match="did not answer with a router's status"):
        asyncio.run(fetch_malformed())


def status_with(bounds: list[float], counts: list[int]) -> dict[str, Any]:
    return {**STATUS, "workers": [], "latency": {"bounds_s": bounds, "first_token": counts, "inter_token": counts}}


def test_routers_may_count_latencies_with_other_bounds() -> None:
    """Routers are updated one after the other, and each release may have other buckets."""
    merger, observer = StatusMerger(), StatusObserver()
    old, new = [1.0, 2.0], [1.0]
    steps = [
        {"a": status_with(old, [1, 1, 1]), "b": status_with(old, [2, 2, 2])},
        {"a": status_with(old, [4, 1, 1]), "b": status_with(new, [0, 0])},
        {"a": status_with(new, [0, 0]), "b": status_with(new, [5, 0])},
        {"a": status_with(new, [3, 0]), "b": status_with(new, [9, 0])},
    ]
    found = []
    for now, step in enumerate(steps):
        merged = merger.merge(step)
        observer.observe(merged, {}, float(now))
        found.append(merged["latency"]["first_token"])
    assert found[1] == [3, 0, 0] and found[3] == [7, 0]
