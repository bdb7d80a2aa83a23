"""The autoscaler's loop: it starts workers, drains them before it stops them, and goes on after failures."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from scaled_cluster import BOUNDS, Loop, ScaledCluster, make_row, metric

from emberline.autoscaler.fleet import FleetError, FleetWorker
from emberline.autoscaler.main import MetricsAddress, run_autoscaler
from emberline.autoscaler.observer import StatusObserver, estimate_p90
from emberline.autoscaler.pool_workers import group_workers
from emberline.autoscaler.router_client import RouterClient, RouterUnavailable
from emberline.autoscaler.router_group import RouterGroup
from emberline.autoscaler.start_tracker import StartTracker
from emberline.core.errors import InvalidRequest


def test_the_minimum_is_started_and_a_dead_worker_is_replaced() -> None:
    cluster = ScaledCluster()
    loop = Loop(cluster, min_workers=2)
    loop.step(3)
    assert sorted(cluster.rows) == ["auto-both-1", "auto-both-2"] and cluster.started == 2
    del cluster.rows["auto-both-1"]
    loop.step(2)
    assert len(cluster.rows) == 2 and cluster.started == 3


def test_a_worker_is_stopped_only_when_it_has_drained() -> None:
    cluster = ScaledCluster()
    cluster.rows = {name: make_row(name, open=1) for name in ("auto-both-a", "auto-both-b", "by-hand")}
    cluster.rows["auto-both-b"]["open"] = 3
    loop = Loop(cluster)
    loop.step(12)
    # The worker that was started by hand cannot be stopped, so both others are drained.
    assert [name for name, _ in cluster.drains] == ["auto-both-a", "auto-both-b"]
    assert not cluster.stopped
    cluster.rows["auto-both-a"]["open"] = 0
    loop.step()
    assert cluster.stopped == ["auto-both-a"]
    loop.step(30)  # drain_timeout
    assert cluster.stopped == ["auto-both-a", "auto-both-b"] and "by-hand" in cluster.rows


def test_a_worker_that_is_draining_serves_again_before_another_is_started() -> None:
    cluster = ScaledCluster()
    cluster.rows = {name: make_row(name, open=1) for name in ("auto-both-a", "auto-both-b")}
    loop = Loop(cluster)
    loop.step(12)
    assert len(cluster.drains) == 1
    drained = cluster.drains[0][0]
    for row in cluster.rows.values():
        row.update(open=12, waiting=4)
    loop.step()
    assert (drained, False) in cluster.drains and cluster.rows[drained]["health"] == "ready"


def test_a_new_autoscaler_finishes_the_drain_of_a_killed_one() -> None:
    cluster = ScaledCluster()
    cluster.rows = {name: make_row(name) for name in ("auto-both-a", "auto-both-b")}
    cluster.rows["auto-both-a"]["health"] = "draining"
    Loop(cluster).step(2)
    loop = Loop(cluster)
    loop.step(2)
    assert cluster.stopped == ["auto-both-a"] and not cluster.started
    assert list(cluster.rows) == ["auto-both-b"]


@pytest.mark.parametrize("what", ["router_fails", "fleet_fails"])
def test_nothing_changes_while_the_router_or_the_fleet_does_not_answer(what: str) -> None:
    cluster = ScaledCluster()
    loop = Loop(cluster)
    loop.step(2)
    setattr(cluster, what, True)
    cluster.silent_count = 1
    loop.step(10)
    assert cluster.started == 1 and not cluster.drains and metric(loop, "errors_total") == 10
    assert metric(loop, "silent_routers") == 1
    setattr(cluster, what, False)
    del cluster.rows["auto-both-1"]
    loop.step(2)
    assert cluster.started == 2


def test_starts_that_fail_are_tried_less_and_less_often() -> None:
    cluster = ScaledCluster()
    cluster.starts_fail = True
    loop = Loop(cluster)
    loop.step(120)  # ten minutes
    assert 8 < cluster.started < 25 and metric(loop, "failed_starts_total") >= 8
    cluster.starts_fail = False
    loop.step(20)
    assert len(cluster.rows) == 1


def test_a_worker_that_never_becomes_ready_is_replaced() -> None:
    cluster = ScaledCluster()
    cluster.becomes_ready = False
    loop = Loop(cluster)
    loop.step(125)
    assert cluster.stopped == ["auto-both-1"] and cluster.started == 2


def test_a_worker_whose_replacement_failed_is_replaced_soon() -> None:
    cluster = ScaledCluster()
    cluster.rows["auto-both-x"] = make_row("auto-both-x", health="stuck")
    cluster.rows["steady"] = make_row("steady")
    replace_worker, failures = cluster.replace_worker, [FleetError("busy")]

    async def fail_once(name: str) -> bool:
        if failures:
            raise failures.pop()
        return await replace_worker(name)

    cluster.replace_worker = fail_once  # type: ignore[method-assign]
    loop = Loop(cluster)
    loop.step(33)
    assert not failures and cluster.stopped == ["auto-both-x"]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_stuck_worker_keeps_its_place_and_is_replaced_in_the_end(replaces: bool) -> None:
    cluster = ScaledCluster()
    cluster.replaces_workers = replaces
    cluster.rows["auto-both-x"] = make_row("auto-both-x", health="stuck", open=1)
    cluster.rows |= {f"hand-{i}": make_row(f"hand-{i}", open=8, waiting=8) for i in range(7)}
    loop = Loop(cluster)  # at most 8 workers, and the load needs more
    loop.step(20)
    assert not cluster.started and not cluster.stopped
    cluster.becomes_ready = False
    loop.step(13)  # its place is free in the step after its end
    assert cluster.stopped == ["auto-both-x"] and cluster.started == (not replaces)
    assert [worker.name for worker in cluster.starting] == ["auto-both-x" if replaces else "auto-both-1"]


def test_a_stuck_worker_that_recovers_is_kept_and_others_serve_meanwhile() -> None:
    cluster = ScaledCluster()
    cluster.rows["auto-both-x"] = make_row("auto-both-x", health="stuck", open=1)
    loop = Loop(cluster)
    loop.step(20)
    assert cluster.started == 1  # the pool needs one that serves
    cluster.rows["auto-both-x"]["health"] = "ready"
    loop.step()
    cluster.rows["auto-both-x"]["health"] = "stuck"
    loop.step(20)
    assert "auto-both-x" not in cluster.stopped


def test_the_start_of_a_pod_is_measured_from_its_order_on() -> None:
    tracker = StartTracker(30.0)

    def update(now: float, *workers: FleetWorker, ready: Sequence[str] = ()) -> None:
        rows = [make_row(name, role="decode") for name in ready]
        tracker.update(group_workers({"workers": rows}, workers, ["prefill", "decode"]), now)

    update(-5.0)
    update(0.0, FleetWorker("deployment/my-prefill-app/pending-0", "decode", is_placeholder=True))
    update(40.0, FleetWorker("my-prefill-app-x7", "decode"))
    assert not tracker.failed_starts
    update(130.0, FleetWorker("my-prefill-app-x7", "decode"), ready=["my-prefill-app-x7"])
    assert tracker.usual_start_s == pytest.approx(30 + 0.3 * 100)
    update(140.0, FleetWorker("my-prefill-app-x8", "decode"))
    update(150.0)  # it ended before it was ready; its name has the name of another role
    assert tracker.failed_starts == 1 and tracker.may_start("prefill", 150.0) and not tracker.may_start("decode", 150.0)


def test_a_worker_that_is_ready_again_or_was_starting_already_is_no_measured_start() -> None:
    tracker = StartTracker(60.0)

    def update(now: float, *names: str, ready: bool = False, incarnation: str = "1") -> None:
        rows = [make_row(name, incarnation=incarnation) for name in names if ready]
        tracker.update(group_workers({"workers": rows}, [FleetWorker(name, "both") for name in names], ["both"]), now)

    update(0.0, "a", "b")  # they were started by an earlier autoscaler
    update(5.0, "a", "b", ready=True)
    update(10.0, "a", "b")  # the router was restarted
    update(15.0, "a", "b", ready=True)
    assert tracker.usual_start_s == 60.0
    update(20.0, "a", "b")
    update(25.0)  # they were ready before they ended
    assert not tracker.failed_starts and not tracker._ready and not tracker._since
    update(30.0, "a")  # as a pod of a StatefulSet, with its name of before
    update(40.0, "a", ready=True, incarnation="2")
    assert tracker.usual_start_s == pytest.approx(60 - 0.3 * 50)


def test_an_empty_pool_starts_a_worker_when_a_request_waits() -> None:
    cluster = ScaledCluster()
    loop = Loop(cluster, min_workers=0, idle_time=60.0)
    loop.step(5)
    assert not cluster.started
    cluster.waiting = 2
    loop.step(2)
    assert len(cluster.rows) == 1 and metric(loop, "workers_changed_total") == 1
    cluster.waiting = 0
    loop.step(20)
    assert cluster.stopped == ["auto-both-1"] and not cluster.rows


@pytest.mark.parametrize("counter", ["answered", "prompt_tokens", "generated_tokens"])
def test_requests_that_end_between_two_looks_keep_a_pool(counter: str) -> None:
    cluster = ScaledCluster()
    cluster.rows["auto-both-a"] = make_row("auto-both-a")
    loop = Loop(cluster, min_workers=0, idle_time=60.0)
    for _ in range(30):
        loop.step(5)
        cluster.rows["auto-both-a"][counter] += 1
    assert not cluster.drains
    loop.step(20)
    assert cluster.stopped == ["auto-both-a"]


def test_a_drained_worker_sleeps_and_is_woken_before_another_is_started() -> None:
    cluster = ScaledCluster()
    cluster.rows = {name: make_row(name) for name in ("auto-both-a", "auto-both-b")}
    loop = Loop(cluster, min_workers=0, idle_time=60.0, sleep=1)
    loop.step(30)
    asleep, stopped = list(cluster.rows), cluster.stopped
    assert len(asleep) == len(stopped) == 1 and cluster.rows[asleep[0]]["asleep"]
    assert cluster.rows[asleep[0]]["health"] == "ready"  # the router sends it the next request
    assert metric(loop, 'workers{pool="both",state="asleep"}') == 1
    loop.step(30)
    assert list(cluster.rows) == asleep and not cluster.started
    cluster.waiting = 20
    loop.step()
    assert not cluster.rows[asleep[0]]["asleep"] and not cluster.started
    cluster.rows[asleep[0]].update(open=12, waiting=4)
    loop.step(2)
    assert cluster.started


def test_a_worker_that_a_request_woke_counts_as_ready() -> None:
    cluster = ScaledCluster()
    cluster.rows["auto-both-a"] = make_row("auto-both-a", asleep=True, open=1)
    loop = Loop(cluster, sleep=1)
    loop.step()
    assert metric(loop, 'workers{pool="both",state="ready"}') == 1 and not cluster.started


@pytest.mark.parametrize("can_sleep", [True, False])
def test_workers_that_cannot_sleep_or_are_too_many_are_stopped(can_sleep: bool) -> None:
    cluster = ScaledCluster()
    cluster.can_sleep = can_sleep
    cluster.rows = {name: make_row(name, asleep=can_sleep) for name in ("auto-both-a", "auto-both-b", "auto-both-c")}
    Loop(cluster, min_workers=0, idle_time=10.0, sleep=1).step(20)
    assert len(cluster.rows) == can_sleep and len(cluster.stopped) == 3 - can_sleep and not cluster.started


def test_workers_and_requests_of_other_models_do_not_count() -> None:
    cluster = ScaledCluster()
    cluster.rows["other"] = make_row("other", models=["x", "minilm"])  # has the same embedder
    loop = Loop(cluster, min_workers=0, idle_time=60.0, models=["m"])
    cluster.waiting, cluster.waiting_model = 3, "x"
    loop.step(2)
    assert not cluster.started and cluster.announced == {"m"}
    cluster.waiting_model = "m"
    loop.step(2)
    assert cluster.started == 1 and "auto-both-1" in cluster.rows
    loop.step()
    assert cluster.announced == {"m", "minilm"}
    cluster.waiting_model = ""
    assert metric(loop, 'workers{pool="both",state="ready"}') == 1


def test_models_that_are_not_named_are_those_of_the_fleets_workers() -> None:
    cluster = ScaledCluster()
    cluster.rows = {"auto-both-a": make_row("auto-both-a"), "other": make_row("other", models=["x", "minilm"])}
    loop = Loop(cluster)
    loop.step()
    assert metric(loop, 'workers{pool="both",state="ready"}') == 1 and cluster.announced == {"m", "minilm"}


def test_a_router_that_is_not_there_is_named_soon() -> None:
    async def run() -> None:
        client = RouterClient("http://127.0.0.1:9", None)
        with pytest.raises(RouterUnavailable, match=r"no router answers at http://127.0.0.1:9.*--router"):
            await client.fetch_status()
        client.close()

    asyncio.run(run())


def test_workers_of_an_earlier_autoscaler_outlive_one_that_cannot_start() -> None:
    cluster = ScaledCluster()
    cluster.rows["auto-both-1"] = make_row("auto-both-1", open=3)
    taken = socket.create_server(("127.0.0.1", 0))

    async def run() -> None:
        address = MetricsAddress("127.0.0.1", taken.getsockname()[1])
        router, settings = RouterGroup([RouterClient("http://127.0.0.1:9", None)]), Loop(cluster).settings
        with pytest.raises(InvalidRequest, match="cannot listen"):
            await run_autoscaler(settings, router, cluster, address, keep_workers=False)

    with taken:
        asyncio.run(run())
    assert list(cluster.rows) == ["auto-both-1"]


def test_requests_of_other_routers_keep_a_worker() -> None:
    row = make_row("a", open_by_other_routers=10)
    seen = observe(StatusObserver(), 0.0, [row])
    assert not seen.is_idle and seen.open_requests == 10 and seen.waiting_requests == 2
    cluster = ScaledCluster()
    cluster.rows["auto-both-1"] = make_row("auto-both-1", health="draining", open_by_other_routers=1)
    loop = Loop(cluster)
    loop.autoscaler._draining_since["auto-both-1"] = 0.0
    cluster.rows["steady"] = make_row("steady")
    loop.step()
    assert not cluster.stopped
    cluster.rows["auto-both-1"]["open_by_other_routers"] = 0
    loop.step()
    assert cluster.stopped == ["auto-both-1"]


def observe(observer: StatusObserver, now: float, rows: list[dict[str, Any]], **status: Any) -> Any:
    latency = {"bounds_s": BOUNDS, "first_token": [0, 0, 0, 0], "inter_token": [0, 0, 0, 0]}
    full: Mapping[str, Any] = {"workers": rows, "waiting_requests": 0, "refused": 0, "latency": latency, **status}
    return observer.observe(full, group_workers(full, [], ["both"]), now)["both"]


def test_arriving_tokens_are_those_done_and_those_more_in_flight() -> None:
    observer = StatusObserver()
    observe(observer, 0.0, [make_row("a", prompt_tokens=1000, generated_tokens=50)])
    rows = [
        make_row("a", prompt_tokens=2000, generated_tokens=150, prefill_tokens=500, decode_tokens=100),
        make_row("b", prompt_tokens=500, generated_tokens=0),
    ]
    seen = observe(observer, 10.0, rows)
    assert seen.prompt_rate == 200.0 and seen.output_rate == 20.0 and seen.prompt_backlog == 500
    restarted = make_row("a", incarnation="other", prompt_tokens=10)
    assert observe(observer, 20.0, [restarted]).prompt_rate == 0.0  # fewer in flight than before


def test_work_is_not_counted_again_after_a_restart_of_the_router() -> None:
    observer = StatusObserver()
    observe(observer, 0.0, [make_row("a", prompt_tokens=10_000, generated_tokens=500)])
    assert observe(observer, 5.0, []).prompt_rate == 0.0  # the router knows no worker yet
    seen = observe(observer, 10.0, [make_row("a", prompt_tokens=11_000, generated_tokens=550)])
    assert seen.prompt_rate == 200.0 and seen.output_rate == 10.0
    seen = observe(observer, 10_000.0, [])
    assert not observer._growth._last  # of workers that are gone for long


def test_a_worker_that_leaves_does_not_hide_the_answers_of_others() -> None:
    observer = StatusObserver()
    observe(observer, 0.0, [make_row("a", answered=1000), make_row("b", answered=1000)])
    assert observe(observer, 5.0, [make_row("a", answered=1099)], refused=1).refused_share == 0.01


def test_refused_and_waiting_requests_are_seen() -> None:
    observer = StatusObserver()
    observe(observer, 0.0, [make_row("a", answered=10)], refused=5)
    seen = observe(observer, 5.0, [make_row("a", answered=20, open=12)], refused=15, waiting_requests=3)
    assert seen.refused_share == 0.5 and seen.waiting_requests == 7 and seen.slots == 8


def test_latencies_are_those_of_the_last_half_minute() -> None:
    observer = StatusObserver()

    def observe_latency(now: float, first_token: list[int]) -> float | None:
        latency = {"bounds_s": BOUNDS, "first_token": first_token, "inter_token": [0, 0, 0, 0]}
        seen: float | None = observe(observer, now, [], latency=latency).ttft_s
        return seen

    assert observe_latency(0.0, [100, 0, 0, 0]) is None
    assert observe_latency(20.0, [110, 0, 0, 0]) == pytest.approx(0.009)
    assert observe_latency(40.0, [110, 0, 10, 0]) == pytest.approx(0.1 + 0.9 * 0.8)
    assert observe_latency(60.0, [110, 0, 10, 10]) == 1.0
    assert observe_latency(120.0, [110, 0, 10, 10]) is None
    assert estimate_p90(BOUNDS, [0] * 4, [9, 1, 0, 0]) == pytest.approx(0.01)
