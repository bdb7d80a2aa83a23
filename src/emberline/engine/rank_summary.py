"""RankSummary: what one rank of a loaded engine holds. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankSummary:
    rank: int
    stage: int  # of the pipeline
    tensor_rank: int  # within the stage
    layers: int
    weight_bytes: int
    kv_bytes: int
    cost_share: float = 0.0  # of a step's time on all stages, as measured at the start; 0: not measured
