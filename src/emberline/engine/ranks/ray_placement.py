"""Which Ray resources an engine asks for: bundles for its nodes. This module does not import Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from emberline.core.engine_config import EngineConfig
from emberline.core.parallel_config import MAX_RANKS

CPU, GPU = "CPU", "GPU"


@dataclass(frozen=True, slots=True)
class RayNode:
    """A live node of a Ray cluster."""

    id: str
    address: str
    resources: dict[str, float]  # all of them, also those in use

    def describe(self) -> str:
        counts = ", ".join(f"{self.resources.get(kind, 0):g} {kind}s" for kind in (CPU, GPU) if kind in self.resources)
        return f"{self.address} ({counts or 'no CPUs'})"


@dataclass(frozen=True, slots=True)
class Placement:
    """What an engine asks Ray for: the same resources on each of several nodes, of which the first is this one."""

    num_nodes: int
    ranks_per_node: int
    units_per_rank: int  # CPUs or GPUs
    kind: str  # CPU or GPU

    @property
    def bundle(self) -> dict[str, float]:
        return {self.kind: float(self.ranks_per_node * self.units_per_rank)}

    def describe(self) -> str:
        units = self.ranks_per_node * self.units_per_rank
        return f"{self.num_nodes} node{'s' * (self.num_nodes > 1)} with {units} {self.kind}{'s' * (units > 1)} each"


def list_placements(
    config: EngineConfig, kind: str, here: RayNode, nodes: Sequence[RayNode], max_nodes: int = MAX_RANKS
) -> Iterator[Placement]:
    """Yield the placements that the cluster could grant when nothing else runs on it, those on fewer nodes first.

    If there is none, yield only the placement that asks for the least on each node. `here`: this node, one of `nodes`.
    `max_nodes`: the most nodes of a placement."""
    num_ranks, found = config.parallel.num_ranks, False
    for count in range(1, num_ranks + 1):
        if num_ranks % count or count > max_nodes:
            continue
        placement = _fit(config, kind, num_ranks // count, count, here, nodes)
        if placement is not None:
            found = True
            yield placement
    if not found:
        count = min(num_ranks, max_nodes)
        yield Placement(count, num_ranks // count, config.threads if kind == CPU and config.threads else 1, kind)


def _fit(
    config: EngineConfig, kind: str, ranks_per_node: int, count: int, here: RayNode, nodes: Sequence[RayNode]
) -> Placement | None:
    """Return the placement on `count` nodes; None: the cluster has too few nodes that are large enough.

    A rank gets --threads CPUs. Without this setting, the ranks of a node divide as many CPUs as the smallest of these
    nodes has."""
    others = sorted((n.resources.get(kind, 0.0) for n in nodes if n.id != here.id), reverse=True)[: count - 1]
    units = min([here.resources.get(kind, 0.0), *others]) // ranks_per_node
    if len(others) < count - 1 or units < 1:
        return None
    if kind == GPU:
        return Placement(count, ranks_per_node, 1, kind)
    if config.threads:
        return Placement(count, ranks_per_node, config.threads, kind) if units >= config.threads else None
    return Placement(count, ranks_per_node, int(units), kind)
