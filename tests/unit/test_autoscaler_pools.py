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
