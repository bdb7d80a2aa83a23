"""Engines whose experts move, for tests on all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from emberline.engine.engine import Engine
from emberline.engine.ranks import expert_balancer, leader_experts
from emberline.engine.ranks.device_leader import DeviceLeaderRunner

HOT = 2  # experts that all rows of `choose_hot_experts` select


def watch_moves(set_attribute: Callable[[Any, str, object], None]) -> None:
    """Let experts move after few rows, when `move_all` is called, and statistics always have all rows."""
    for name in ("MIN_IMBALANCE", "MIN_ROWS_PER_EXPERT"):
        set_attribute(expert_balancer, name, 0.0)
    set_attribute(leader_experts, "UPDATE_INTERVAL_S", 0.0)


def choose_hot_experts(directory: Path) -> None:
    """Change a DeepSeek V3 checkpoint so that all rows select the first two experts."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor[:HOT] += 100.0
    save_file(tensors, file, metadata={"format": "pt"})


def move_all(engine: Engine, runner: DeviceLeaderRunner, rows: Sequence[int] = ()) -> None:
    """Let all layers have the experts that suit their load. `rows`: of each expert; empty: those that were counted."""
    experts = runner.experts
    assert experts is not None and experts.balancer is not None
    while super(DeviceLeaderRunner, runner).is_preparing:
        runner.prepare_next()  # captures a step
    experts.balancer._next_check = 0.0
    assert engine.is_preparing
    for network in runner.model.movable_layers.values():
        assert network.movable is not None
        if rows:
            network.movable.expert_row_counts.recent[:] = torch.tensor(rows).numpy()
    for _ in runner.model.movable_layers:
        assert runner.prepare_next()
