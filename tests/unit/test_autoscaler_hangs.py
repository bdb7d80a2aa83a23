"""Workers that hang: which are replaced, after which time, and which are not."""

from __future__ import annotations

import asyncio
import socket

import pytest
from scaled_cluster import Loop, ScaledCluster, make_row, metric

from emberline.autoscaler.fleet import FleetWorker
from emberline.autoscaler.pool_workers import group_workers
from emberline.autoscaler.settings import PoolSettings
from emberline.autoscaler.worker_probe import ProbeResult, probe_worker
from emberline.core.errors import InvalidRequest

NAMES = ("auto-both-a", "auto-both-b", "auto-both-c")


def make_cluster(*lost: str, probe: ProbeResult = ProbeResult.SILENT) -> ScaledCluster:
    cluster = ScaledCluster()
    cluster.rows = {name: make_row(name, url=name, open=1) for name in NAMES}
    cluster.probes = dict.fromkeys(NAMES, probe)
    for name in lost:
        cluster.rows[name].update(health="lost", seconds_since_beat=60.0)
    return cluster


def test_a_lost_worker_that_does_not_answer_is_replaced_after_the_timeout() -> None:
    cluster = make_cluster("auto-both-b")
    loop = Loop(cluster, min_workers=3)  # steps of 5 s, lost_timeout 30 s
    loop.step(7)
    assert not cluster.stopped and not cluster.probed and not cluster.started
    loop.step(3)
    assert cluster.stopped == ["auto-both-b"] and cluster.probed == ["auto-both-b"] and cluster.started == 1
    assert metric(loop, 'workers_replaced_total{pool="both",reason="lost"}') == 1


@pytest.mark.parametrize("probe", [ProbeResult.ANSWERED, ProbeResult.REFUSED])
def test_a_lost_worker_that_answers_or_may_be_starting_is_kept(probe: ProbeResult) -> None:
    cluster = make_cluster("auto-both-b", probe=probe)
    loop = Loop(cluster, min_workers=3)
    loop.step(100)  # 500 s
    assert cluster.probed and not cluster.stopped
    loop.step(40)
    # One whose process never listens is replaced after ten minutes. One that answers is not, however long it is lost.
    assert cluster.stopped == ([] if probe is ProbeResult.ANSWERED else ["auto-both-b"])
    del cluster.rows[NAMES[0]]  # the routers have forgotten a worker, whose process runs
    cluster.starting = [FleetWorker(NAMES[0], "both")]
    cluster.becomes_ready = False
    cluster.probes[NAMES[0]] = ProbeResult.ANSWERED
    loop.step(150)
    assert NAMES[0] not in cluster.stopped and NAMES[0] in cluster.probed


def test_a_worker_whose_url_is_not_known_keeps_the_time_of_a_start() -> None:
    cluster = make_cluster("auto-both-b")
    del cluster.rows["auto-both-b"]["url"]  # a router of an earlier release
    loop = Loop(cluster, min_workers=3)
    loop.step(100)
    assert not cluster.stopped
    loop.step(25)
    assert cluster.stopped == ["auto-both-b"]


def test_a_router_that_does_not_answer_or_was_restarted_kills_no_worker() -> None:
    cluster = make_cluster("auto-both-b")
    loop = Loop(cluster, min_workers=3)
    loop.step(5)
    cluster.router_fails = True
    loop.step(20)
    cluster.router_fails = False
    loop.step(5)
    assert not cluster.stopped  # the time counts again from the first answer on
    rows = cluster.rows
    cluster.starting = [FleetWorker(name, "both") for name in rows]
    cluster.rows, cluster.becomes_ready = {}, False  # it was restarted, and knows no worker yet
    loop.step(20)
    cluster.rows, cluster.starting = rows, []
    loop.step(5)
    assert not cluster.stopped and not cluster.probed and not cluster.started
    loop.step(5)
    assert cluster.stopped == ["auto-both-b"]


def test_a_router_that_loses_all_workers_at_once_is_not_believed_for_nine_minutes() -> None:
    cluster = make_cluster(*NAMES)
    loop = Loop(cluster, min_workers=3)
    loop.step(100)
    assert not cluster.stopped and not cluster.started
    cluster.rows["hand"] = make_row("hand")  # it gets heartbeats again
    loop.step()
    assert sorted(cluster.stopped) == sorted(NAMES)
    cluster = make_cluster(*NAMES)
    Loop(cluster, min_workers=3).step(112)  # 560 s; a router forgets the workers after 600 s
    assert sorted(cluster.stopped) == sorted(NAMES)
    with pytest.raises(InvalidRequest, match="at most 540"):
        Loop(cluster, lost_timeout=541.0)


def test_a_pod_that_kubernetes_does_not_create_is_not_replaced() -> None:
    cluster = make_cluster()
    cluster.starting = [FleetWorker("deployment/both/pending-0", "both", is_placeholder=True)]
    cluster.becomes_ready = False
    loop = Loop(cluster, min_workers=4)
    loop.step(150)
    assert not cluster.stopped and metric(loop, "workers_replaced_total{") == 0


def test_a_single_lost_worker_is_replaced() -> None:
    cluster = make_cluster("auto-both-a")
    cluster.rows = {"auto-both-a": cluster.rows["auto-both-a"]}
    Loop(cluster).step(9)
    assert cluster.stopped == ["auto-both-a"]


@pytest.mark.parametrize("changes", [{"max_gpus": 3}, {"pools": (PoolSettings("both", 3, 3),)}], ids=["gpus", "max"])
def test_the_budget_holds_until_the_process_is_gone(changes: dict[str, object]) -> None:
    cluster = make_cluster("auto-both-b")
    ending = list[FleetWorker]()
    list_workers, stop_worker = cluster.list_workers, cluster.stop_worker

    async def stop_slowly(name: str) -> None:
        await stop_worker(name)
        ending.append(FleetWorker(name, "both", is_stopping=True))

    async def list_all() -> list[FleetWorker]:
        return [*await list_workers(), *ending]

    cluster.stop_worker, cluster.list_workers = stop_slowly, list_all  # type: ignore[method-assign]
    loop = Loop(cluster, min_workers=3, **changes)
    loop.step(20)
    assert cluster.stopped == ["auto-both-b"] and not cluster.started
    ending.clear()
    loop.step()
    assert cluster.started == 1


def test_a_pod_that_was_restarted_after_its_last_heartbeat_is_starting() -> None:
    row = make_row("a", health="lost", seconds_since_beat=60.0)
    ages = {None: {"a"}, 100.0: {"a"}, 50.0: set[str]()}
    for age_s, lost in ages.items():
        pool = group_workers({"workers": [row]}, [FleetWorker("a", "both", age_s=age_s)], ["both"])["both"]
        assert pool.lost == lost and pool.starting == ["a"]


def test_a_probe_tells_a_process_that_hangs_from_one_that_answers() -> None:
    async def run() -> None:
        async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()  # as a TLS server does

        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert (await reader.readline()).startswith(b"GET /health/live HTTP/1.1")
            writer.write(b"HTTP/1.1 404 Not Found\r\n\r\n")

        for handler in (close, reply):
            async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                assert await probe_worker(f"https://127.0.0.1:{port}") is ProbeResult.ANSWERED
                assert await probe_worker(f"http://localhost:{port}") is ProbeResult.ANSWERED  # also if it is ::1 first
        assert await probe_worker(f"http://127.0.0.1:{port}") is ProbeResult.REFUSED
        with socket.create_server(("127.0.0.1", 0)) as hanging:  # the kernel accepts, the process does not
            port = hanging.getsockname()[1]
            assert await probe_worker(f"http://127.0.0.1:{port}", 0.05) is ProbeResult.SILENT

    asyncio.run(run())
