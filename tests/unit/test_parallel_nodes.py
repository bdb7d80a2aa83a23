"""Settings of an engine on several nodes, and which node has which ranks."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.engine.ranks.control import list_shared_settings
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.settings import check_node_settings

VALID: dict[str, Any] = {"pp": 2, "nodes": 2, "master": "10.0.0.1:29500"}


def test_every_layout_has_its_leader_on_node_0() -> None:
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            for nodes in (n for n in (1, 2, 4) if tp * pp % n == 0):
                layout = Layout(tp, pp, nodes=nodes)
                placed = [layout.ranks_of(node) for node in range(nodes)]
                assert layout.leader in placed[0]
                assert {len(ranks) for ranks in placed} == {layout.ranks_per_node}
                assert sorted(chain.from_iterable(placed)) == list(range(layout.num_ranks))


def test_consecutive_stages_share_a_node() -> None:
    assert [Layout(pp=4, nodes=2).ranks_of(node) for node in range(2)] == [[2, 3], [0, 1]]
    assert [Layout(tp=2, pp=2, nodes=2).ranks_of(node) for node in range(2)] == [[2, 3], [0, 1]]
    assert [Layout(tp=4, nodes=2).ranks_of(node) for node in range(2)] == [[0, 1], [2, 3]]
    assert Layout(tp=2, pp=2, nodes=2).describe(1) == "rank 1 of 4 (stage 0, tensor rank 1, node 1)"
    assert Layout(tp=2, pp=2, nodes=2).describe_node(1) == "node 1 (ranks 0, 1 of 4)"


@pytest.mark.parametrize(
    ("changed", "param", "message"),
    [
        ({"nodes": 3}, "nodes", "nodes is 3, which does not divide 2 ranks"),
        ({"nodes": 0}, "nodes", "nodes is 0, which does not divide"),
        ({"node_rank": 2}, "node_rank", "node_rank is 2; it must be from 0 to 1"),
        ({"node_rank": -1}, "node_rank", "node_rank is -1; it must be from 0 to 1"),
        ({"master": None}, "master", "nodes is 2, but master is not set"),
        ({"master": "10.0.0.1"}, "master", "master is '10.0.0.1'; it must be of the form HOST:PORT"),
        ({"master": "10.0.0.1:65535"}, "master", "with a port below 65535"),
        ({"nodes": 1}, "master", "master is 10.0.0.1:29500, but nodes is 1"),
        ({"nodes": 1, "master": None, "node_address": "10.0.0.2"}, "node_address", "but nodes is 1"),
        ({"node_timeout": 0.0}, "node_timeout", "node_timeout is 0; it must be above 0"),
        ({"rank_timeout": math.inf}, "rank_timeout", "rank_timeout is inf s; it must be from 1 to 86400 s"),
        ({"rank_timeout": math.nan}, "rank_timeout", "rank_timeout is nan s; it must be from 1 to 86400 s"),
    ],
)
def test_invalid_settings(changed: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        EngineConfig.build("", **{**VALID, **changed})
    assert error.value.param == param


@pytest.mark.parametrize("collectives", ["ipc", "nccl", "gloo"])
def test_one_rank_has_no_collectives(collectives: str) -> None:
    with pytest.raises(InvalidRequest, match=f"collectives is {collectives}, but there is one rank") as error:
        EngineConfig.build("", collectives=collectives)
    assert error.value.param == "collectives"
    EngineConfig.build("", collectives=collectives, pp=2)


def test_master_may_be_an_ipv6_address() -> None:
    assert EngineConfig.build("", **{**VALID, "master": "[fd00::1]:29500"}).parallel.parse_master() == (
        "fd00::1",
        29500,
    )


def test_settings_that_nodes_do_not_support() -> None:
    check_node_settings(EngineConfig.build("", **VALID))
    with pytest.raises(InvalidRequest, match="the setting kv_host_memory does not work with 2 nodes yet"):
        check_node_settings(EngineConfig.build("", **VALID, kv_host_memory=1 << 20))
    with pytest.raises(InvalidRequest, match="node_rank is 1, but only node 0 has an engine"):
        check_node_settings(EngineConfig.build("", **VALID, node_rank=1))


def test_settings_that_may_differ_between_nodes() -> None:
    ours = EngineConfig.build("/here", **VALID)
    theirs = EngineConfig.build("/there", **VALID, node_rank=1, node_address="10.0.0.2", threads=3)
    assert list_shared_settings(ours) == list_shared_settings(theirs)
    assert list_shared_settings(ours) != list_shared_settings(theirs.with_settings(rank_timeout=3.0))
