"""LatentPlan: the plan of a forward pass with latent attention on a GPU. `latent_planner` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextPass:
    """One pass over a bounded number of cached tokens, which computes and uses their keys and values for each head."""

    sources: Tensor  # [blocks, 2] int32: row, and index in the row's block table
    ranges: Tensor  # [rows, 3] int32: a row's first key in the pass, number of keys, whether earlier passes had any


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The fields of a plan that only latent attention needs."""

    decode_tokens: int  # number of leading tokens of the step that include all tokens of decode rows
    has_context: bool  # whether chunks may have earlier keys, to which they attend on the latents
    query_limit: Tensor  # [1] int32: number of leading tokens that need queries of latents
    context_passes: tuple[ContextPass, ...] = ()  # where chunks attend with keys and values of each head instead


@dataclass(frozen=True, slots=True)
class LatentScratch:
    """Scratch memory for the partial results of decode rows. All layers use it one after the other."""

    partials: Tensor  # float32: for each partial result, the numbers of all queries and heads
    max_and_sum: Tensor  # float32
