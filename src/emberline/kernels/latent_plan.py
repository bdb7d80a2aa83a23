"""LatentPlan: the plan of a forward pass with latent attention on a GPU. `latent_planner` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextPass:
    """A bounded number of cached tokens whose keys and values of each head are computed and used in one pass."""

    sources: Tensor  # [blocks, 2] int32: row, and index in the row's block table
    ranges: Tensor  # [rows, 3] int32: first key among those of the pass, their number, whether earlier passes had any


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The fields of a plan that only latent attention needs."""

    decode_tokens: int  # number of first tokens of the step that have all tokens of decode rows among them
    has_context: bool  # whether chunks may have keys before them, to which they attend on the latents
    query_limit: Tensor  # [1] int32: number of first tokens for which queries of latents are needed
    context_passes: tuple[ContextPass, ...] = ()  # where chunks attend with keys and values of each head instead


@dataclass(frozen=True, slots=True)
class LatentScratch:
    """Scratch memory for the partial results of decode rows. All layers use it one after the other."""

    partials: Tensor  # float32, for each place the numbers of all queries and heads
    max_and_sum: Tensor  # float32
