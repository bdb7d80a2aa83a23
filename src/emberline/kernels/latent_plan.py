"""LatentPlan: what the plan of a forward pass has for latent attention on a GPU. `latent_planner` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """What a plan adds for latent attention."""

    decode_tokens: int  # number of first tokens of the step that have all tokens of decode rows among them
    has_context: bool  # whether chunks may have keys before them
    query_limit: Tensor  # [1] int32: number of first tokens for which queries of latents are needed


@dataclass(frozen=True, slots=True)
class LatentScratch:
    """Scratch memory for the partial results of decode rows. All layers use it one after the other."""

    partials: Tensor  # float32, for each place the numbers of all queries and heads
    max_and_sum: Tensor  # float32
