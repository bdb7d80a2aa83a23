"""What an engine asks of a Ray cluster: few nodes if possible, always with this one. None of this needs Ray."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EngineUnavailable, InvalidRequest
from emberline.engine.ranks.ray_launcher import check_address, check_granted_gpus, connect_to_ray
from emberline.engine.ranks.ray_placement import CPU, GPU, Placement, RayNode, list_placements


def place(cpus: list[float], kind: str = CPU, max_nodes: int = 64, **settings: Any) -> list[tuple[int, int, int]]:
    """Return nodes, ranks of a node and CPUs of a rank of each placement. `cpus`: of the nodes; the first is here."""
    nodes = [RayNode(f"id{i}", f"10.0.0.{i}", {kind: count}) for i, count in enumerate(cpus)]
    config = EngineConfig.build("m", **settings)
    found = list_placements(config, kind, nodes[0], nodes, max_nodes)
    return [(each.num_nodes, each.ranks_per_node, each.units_per_rank) for each in found]


def test_fewest_nodes_come_first() -> None:
    assert place([8, 8], tp=2, pp=2, threads=1) == [(1, 4, 1), (2, 2, 1)]
    assert place([8, 8], tp=2, pp=2, threads=4) == [(2, 2, 4)]
    assert place([2, 2, 2], tp=3, threads=1) == [(3, 1, 1)], "2 nodes cannot have the same number of ranks"
    assert place([2, 1, 9, 4], pp=4, threads=2) == [(4, 1, 2)], "it waits for larger nodes"


def test_this_node_takes_part() -> None:
    assert place([1, 8, 8], pp=2, threads=1) == [(2, 1, 1)], "all ranks would fit on another node"
    assert place([0, 8, 8], pp=2, threads=1) == [(2, 1, 1)], "the request shows Ray's autoscaler what is missing"


def test_cpus_are_divided_without_threads() -> None:
    assert place([16, 12], tp=4) == [
        (1, 4, 4),
        (2, 2, 6),
    ]
    assert place([3, 12], tp=4) == [(2, 2, 1)]
    assert place([16, 4, 12], tp=2) == [(1, 2, 8), (2, 1, 12)], "the smallest of the largest nodes decides"


def test_gpus() -> None:
    assert place([4, 4], GPU, tp=8) == [(2, 4, 1)]
    assert place([4, 4], GPU, 1, tp=8) == [(1, 8, 1)], "an engine on GPUs of several nodes is not possible yet"
    assert place([8, 8], GPU, 1, tp=8) == [(1, 8, 1)]
    placement = Placement(2, 4, 1, GPU)
    assert placement.bundle == {"GPU": 4.0} and placement.describe() == "2 nodes with 4 GPUs each"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"launcher": "slurm"}, "launcher is 'slurm'; it must be one of processes, ray"),
        ({"launcher": "ray"}, "an engine on one rank needs no other nodes"),
        ({"launcher": "ray", "pp": 2, "nodes": 2, "master": "h:1"}, "which chooses the nodes, but nodes is 2"),
        ({"ray_address": "h:1"}, "ray_address is h:1, but launcher is processes"),
    ],
)
def test_settings_that_do_not_fit_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineConfig.build("m", **settings)


def test_engine_uses_the_gpus_that_ray_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_granted_gpus(["1", "0"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    check_granted_gpus(["4", "5"])
    with pytest.raises(InvalidRequest, match="has reserved GPU 0, 1 of this machine, but this process uses GPU 4, 5"):
        check_granted_gpus(["0", "1"])


@pytest.mark.parametrize("address", ["ray://h:1", "h", "h:", ":1", "h:x", "h:70000"])
def test_wrong_address(address: str) -> None:
    with pytest.raises(InvalidRequest, match="it must be auto or of the form HOST:PORT"):
        check_address(address)


def test_address_without_cluster_is_refused_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(EngineUnavailable, match=f"no Ray cluster answers at {address}: Connection refused"):
            check_address(address)


def test_missing_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidRequest, match="Ray cannot be imported") as refused:
        connect_to_ray(None)
    assert "pip install" in (refused.value.hint or "")
