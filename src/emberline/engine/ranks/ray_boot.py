"""boot_on_ray: builds an Engine on this node and on further nodes that Ray starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from emberline.core.engine_config import EngineConfig
from emberline.core.parallel_config import MAX_RANKS
from emberline.engine.loaded_engine import LoadedEngine
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.node_listener import NodeLauncher
from emberline.engine.ranks.ray_launcher import RayLauncher
from emberline.engine.ranks.settings import check_divisible
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig


def boot_on_ray(
    config: EngineConfig,
    kind: str,
    boot_node: Callable[[EngineConfig, NodeLauncher], LoadedEngine],
    max_nodes: int = MAX_RANKS,
) -> LoadedEngine:
    """Start nodes and load the model on them. Raises EmberlineError if settings, model or the cluster are not usable.

    `kind`: CPU or GPU. `boot_node`: loads the model, given the config of node 0 and the launcher of the other nodes.
    `max_nodes`: the most nodes on which `boot_node` can load it."""
    check_divisible(
        Layout.from_config(config.parallel), ModelConfig.from_checkpoint(Checkpoint.open(Path(config.model)))
    )
    began = time.perf_counter()
    launcher = RayLauncher(config, kind, max_nodes)
    launched = time.perf_counter()
    try:
        loaded = boot_node(launcher.config, launcher)
    except BaseException:
        launcher.close()
        raise
    return replace(loaded, seconds={"ray": launched - began, **loaded.seconds})
