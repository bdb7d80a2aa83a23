"""An autoscaler of several routers: loads are added up, latencies are merged, and a router may be lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scaled_cluster import BOUNDS, make_row

from emberline.autoscaler.observer import StatusObserver
from emberline.autoscaler.pool_workers import group_workers
from emberline.autoscaler.router_client import RouterClient, RouterUnavailable
from emberline.autoscaler.router_group import RouterGroup
from emberline.autoscaler.status_merger import StatusMerger
from emberline.cli.autoscale import _insert_router_urls
from emberline.core.errors import WrongClusterKey


def make_status(*rows: dict[str, Any], ttft: tuple[int, ...] = (0, 0, 0, 0), **changes: Any) -> dict[str, Any]:
    latency = {"bounds_s": BOUNDS, "first_token": list(ttft), "inter_token": [0, 0, 0, 0]}
    return {"workers": list(rows), "waiting_requests": 0, "refused": 0, "latency": latency, **changes}


def test_requests_of_all_routers_are_added_and_reports_of_workers_are_not() -> None:
    a = make_row("w", open=3, open_by_other_routers=2, prefill_tokens=100, prompt_tokens=900, seconds_since_beat=0.9)
    b = make_row("w", open=2, open_by_other_routers=3, prefill_tokens=50, prompt_tokens=990, seconds_since_beat=0.1)
    waiting = {"waiting_requests": 1, "waiting_by_model": {"m": 1}}
    merged = StatusMerger().merge({"a": make_status(a, **waiting), "b": make_status(b, **waiting)})
    (row,) = merged["workers"]
    assert (row["open"], row["open_by_other_routers"], row["prefill_tokens"], row["prompt_tokens"]) == (5, 0, 150, 990)
    assert merged["waiting_requests"] == 2 and merged["waiting_by_model"] == {"m": 2}


def test_requests_of_a_router_that_does_not_answer_are_known_from_the_others() -> None:
    merged = StatusMerger().merge({"a": make_status(make_row("w", open=3, open_by_other_routers=4))})
    assert (merged["workers"][0]["open"], merged["workers"][0]["open_by_other_routers"]) == (3, 4)


@pytest.mark.parametrize(
    ("healths", "merged"),
    [(("ready", "lost"), "ready"), (("ready", "draining"), "draining"), (("starting", "lost"), "starting")],
)
def test_a_worker_is_ready_if_one_router_can_use_it(healths: tuple[str, str], merged: str) -> None:
    merger = StatusMerger()
    statuses = {url: make_status(make_row("w", health=health)) for url, health in zip("ab", healths, strict=True)}
    assert merger.merge(statuses)["workers"][0]["health"] == merged
    assert merger.missing_drains == ({"a": ["w"]} if merged == "draining" else {})


def test_only_the_requests_of_the_newest_process_of_a_worker_count() -> None:
    old = make_row("w", incarnation="old", open=5, health="draining", seconds_since_beat=3.0)
    merger = StatusMerger()
    merged = merger.merge({"a": make_status(old), "b": make_status(make_row("w", open=1))})
    assert merged["workers"][0]["open"] == 1 and merged["workers"][0]["health"] == "ready"
    assert not merger.missing_drains


def test_latencies_are_merged_as_histograms_and_survive_lost_and_restarted_routers() -> None:
    merger, observer = StatusMerger(), StatusObserver()

    def observe(now: float, **ttft: tuple[int, ...]) -> float | None:
        merged = merger.merge({url: make_status(ttft=counts) for url, counts in ttft.items()})
        seen = observer.observe(merged, group_workers(merged, [], ["both"]), now)["both"]
        return seen.ttft_s

    assert observe(0.0, a=(50, 0, 0, 0), b=(0, 0, 70, 0)) is None
    # 80 of 100 are fast: the mean of both routers' percentiles would be about 0.47 s.
    assert observe(10.0, a=(130, 0, 0, 0), b=(0, 0, 90, 0)) == pytest.approx(0.1 + 0.9 * 0.5)
    assert observe(50.0, a=(140, 0, 0, 0)) == pytest.approx(0.009)  # b is lost
    assert observe(60.0, a=(150, 0, 0, 0), b=(0, 0, 500, 0)) == pytest.approx(0.009)  # what b did meanwhile is old
    assert observe(70.0, a=(3, 0, 0, 0), b=(0, 0, 510, 0)) is not None  # a was restarted
    assert observe(105.0, a=(23, 0, 0, 0), b=(0, 0, 510, 0)) == pytest.approx(0.009)


class FakeRouter:
    def __init__(self, url: str) -> None:
        self.url = url
        self.health = "ready"
        self.error: Exception | None = None
        self.can_sleep = True
        self.calls: list[tuple[Any, ...]] = []

    async def fetch_status(self) -> dict[str, Any]:
        self._fail()
        return make_status(make_row("w", health=self.health))

    async def drain(self, name: str, *, on: bool = True) -> bool:
        self._fail()
        self.calls.append(("drain", name, on))
        self.health = "draining" if on else "ready"
        return name == "w"

    async def set_asleep(self, name: str, *, on: bool = True) -> bool:
        self._fail()
        self.calls.append(("sleep", name, on))
        return self.can_sleep

    async def announce_models(self, names: set[str], seconds: float) -> None:
        self._fail()
        self.calls.append(("announce", *names))

    def close(self) -> None:
        self.calls.append(("close",))

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


def test_orders_go_to_all_routers_that_answer_and_a_restarted_one_gets_them_again() -> None:
    a, b = FakeRouter("a"), FakeRouter("b")
    group = RouterGroup([a, b])  # type: ignore[list-item]

    async def run() -> None:
        await group.fetch_status()
        assert await group.drain("w") and not await group.drain("unknown")
        assert a.calls == b.calls == [("drain", "w", True), ("drain", "unknown", True)]
        b.health = "ready"  # it was restarted
        await group.fetch_status()
        assert b.calls[-1] == ("drain", "w", True) and len(a.calls) == 2
        b.error = RouterUnavailable("gone")
        assert (await group.fetch_status())["workers"][0]["health"] == "draining" and group.silent_count == 1
        await group.announce_models({"m"}, 60.0)
        assert await group.set_asleep("w") and a.calls[-2:] == [("announce", "m"), ("sleep", "w", True)]
        a.error, b.error = RouterUnavailable("slow"), None
        await group.fetch_status()
        assert await group.set_asleep("w", on=False) and b.calls[-1] == ("sleep", "w", False)
        b.error = RouterUnavailable("gone")
        with pytest.raises(RouterUnavailable):
            await group.fetch_status()
        assert group.silent_count == 2
        a.error = WrongClusterKey("wrong")
        with pytest.raises(WrongClusterKey):
            await group.fetch_status()
        group.close()

    asyncio.run(run())
    assert a.calls[-1] == b.calls[-1] == ("close",)


def test_a_router_that_does_not_know_a_worker_does_not_keep_it_from_sleeping() -> None:
    a, b = FakeRouter("a"), FakeRouter("b")
    group = RouterGroup([a, b])  # type: ignore[list-item]

    async def run() -> None:
        a.can_sleep = False  # it was restarted
        assert await group.set_asleep("w")
        b.can_sleep = False
        assert not await group.set_asleep("w")
        a.error = RouterUnavailable("gone")
        assert not await group.set_asleep("w")
        b.error = RouterUnavailable("gone")
        with pytest.raises(RouterUnavailable):
            await group.set_asleep("w")

    asyncio.run(run())


def test_workers_register_with_all_routers() -> None:
    words = ["worker", "--router", "{router}", "--role", "{role}"]
    repeated = ["worker", "--router", "http://a", "--router", "http://b", "--role", "{role}"]
    assert _insert_router_urls(words, ["http://a", "http://b"]) == repeated
    assert _insert_router_urls(["run", "{router}"], ["http://a", "http://b"]) == ["run", "http://a", "http://b"]


def test_a_real_client_of_a_missing_router_is_left_out() -> None:
    async def run() -> None:
        group = RouterGroup([RouterClient("http://127.0.0.1:9", None), FakeRouter("a")])  # type: ignore[list-item]
        assert (await group.fetch_status())["workers"] and group.silent_count == 1
        group.close()

    asyncio.run(run())
