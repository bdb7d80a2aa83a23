"""Pools that share a budget of GPUs: the trouble of one does not stop the others."""

from __future__ import annotations

from scaled_cluster import Loop, ScaledCluster, make_row, metric

from emberline.autoscaler.settings import PoolSettings


def test_a_pool_that_cannot_start_workers_does_not_keep_others_from_removing_theirs() -> None:
    cluster = ScaledCluster()
    cluster.unstartable = {"prefill"}  # the decode workers have all GPUs
    cluster.rows = {name: make_row(name, role="decode") for name in ("auto-decode-a", "auto-decode-b")}
    loop = Loop(cluster, pools=(PoolSettings("prefill"), PoolSettings("decode")))
    loop.step(10)
    assert cluster.stopped == ["auto-decode-b"] and metric(loop, "errors_total") == 10
    cluster.unstartable = set()
    loop.step(2)
    assert [row["role"] for row in cluster.rows.values()] == ["decode", "prefill"]


def test_workers_that_drain_have_their_gpus_until_they_are_gone() -> None:
    cluster = ScaledCluster()
    cluster.rows = {name: make_row(name, role="decode", open=1) for name in ("auto-decode-a", "auto-decode-b")}
    loop = Loop(cluster, pools=(PoolSettings("decode"), PoolSettings("prefill")), max_gpus=2)
    loop.step(10)
    assert cluster.drains == [("auto-decode-b", True)] and not cluster.started  # it still has a request
    cluster.rows["auto-decode-b"]["open"] = 0
    loop.step(3)
    assert [row["role"] for row in cluster.rows.values()] == ["decode", "prefill"] and cluster.started == 1


def test_pools_that_start_workers_at_the_same_time_stay_within_the_budget() -> None:
    cluster = ScaledCluster()
    cluster.rows = {"auto-decode-a": make_row("auto-decode-a", role="decode", health="stuck", open=1)}
    loop = Loop(cluster, pools=(PoolSettings("decode"), PoolSettings("prefill")), max_gpus=2)
    loop.step()
    assert [worker.role for worker in cluster.starting] == ["decode"]
