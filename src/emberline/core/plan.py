"""The data between scheduler and runner: a StepPlan says what to compute, a StepResult what came of it.
Nothing here acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from emberline.core.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """A request the runner has not seen. Sampling and grammar state follow from these and the tokens alone,
    so that any runner can take a request over from any other."""

    id: str
    tokens: list[int]  # the runner's own from now on
    prompt_len: int
    params: SamplingParams
    seed: int


PENDING = -1  # in the place of a token that the step before samples


@dataclass(slots=True)  # not frozen, like Sampled: one is made for every token, and that would take three times as long
class Work:
    """One request's share of a step: compute `tokens` at positions [start, start + len(tokens))."""

    id: str
    start: int
    tokens: Sequence[int]  # the last may be PENDING
    blocks: Sequence[
        int
    ]  # the whole block table, position p lies in blocks[p // block_size]; read it at once: it grows
    samples: bool  # the last of them catches up with what is known: sample its successor
    prompt_logprobs: bool = False
    life: int = 0  # how often the request was preempted before: blocks of different lives have nothing in common


@dataclass(frozen=True, slots=True)
class Copy:
    """One block between the cache and a buffer of a lower tier, which is the runner's until the step's result is in."""

    block: int
    digest: bytes  # what the block holds: tokens.blockhash's
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Carried out in this order: saves, loads, work. A block that is saved may be given away in the same plan."""

    step: int
    admitted: Sequence[Admission]
    work: Sequence[Work]
    ended: Sequence[str]  # the runner may forget these
    saves: Sequence[Copy] = ()
    loads: Sequence[Copy] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(w.tokens) for w in self.work)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """log p of one token under the model itself (before penalties, bias and temperature), and the best alternatives."""

    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    token: int
    logprob: TokenLogprob | None = None
    stop: bool = False  # the grammar is complete: nothing more may follow


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    sampled: dict[str, Sampled]
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(
        default_factory=dict
    )  # one per token computed, of its successor
    failed: dict[str, str] = field(default_factory=dict)  # id -> why this request's own grammar cannot be followed
    seconds: float = 0.0
