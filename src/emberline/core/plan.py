"""Data between scheduler and runner: StepPlan says what to compute, StepResult what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from emberline.core.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that is new to the runner, with everything that the runner needs to know about it.

    The state of sampling and grammar can be rebuilt from these fields, so any runner can continue the request."""

    id: str
    tokens: list[int]  # owned by the runner from now on
    prompt_len: int
    params: SamplingParams
    seed: int


STATE_GROUP = -1  # group of layers that have recurrent states instead of keys and values: LayerGroups.layer_positions
PENDING_TOKEN = -1  # stands for a token that the previous step samples or drafts


@dataclass(frozen=True, slots=True)
class StateWork:
    """The slot with a request's recurrent states in a step, and the slots to copy states from and to."""

    slot: int
    load_from: int | None = None  # slot whose states are copied to `slot` before the step
    # Slot to which the states after `save_end` tokens are copied. A step with `max_shift` may not get so far.
    save_to: int | None = None
    save_end: int = 0
    # Number of accepted tokens of the previous step's draft, over which the states in `slot` first advance. The inputs
    # for these tokens are at the index `draft_slot` of the StateCache, where those for this step's draft replace them.
    num_accepted: int = 0
    draft_slot: int = 0


# Not frozen, like SampledToken: one is made for every token, and a frozen one takes three times as long to make.
@dataclass(slots=True)
class WorkItem:
    """One request's share of a step: compute `tokens` at positions [start, start + len(tokens))."""

    id: str
    start: int
    # Known tokens, of which the last may be PENDING_TOKEN; then the draft, in which all may be PENDING_TOKEN.
    tokens: Sequence[int]
    # The request's whole block table: position p is in blocks[p // block_size]. The scheduler appends to it later.
    blocks: Sequence[int]
    samples: bool  # all known tokens are computed with these: sample the next one
    prompt_logprobs: bool = False
    preemptions: int = 0  # preemptions of the request so far; each one replaces all its blocks
    # Number of drafted tokens at the end of `tokens`. The step samples after each of them, up to the first token that
    # differs from the draft.
    num_draft: int = 0
    # Number of tokens that the draft model proposes behind the sampled ones. The block table has room for them.
    num_propose: int = 0
    # Nonzero if this was planned before the result of the previous step, which verifies a draft of the request, was
    # known: `start` is then too low by the number of drafted tokens that are accepted there, which is at most this.
    max_shift: int = 0
    # Block tables of layers with an attention window, one for each group of them. Released blocks have the entry 0.
    window_blocks: Sequence[Sequence[int]] = ()
    state: StateWork | None = None  # of a model with recurrent layers
    # Blocks with states of another engine, which are copied to the request's slot before the step: kv/state_pages.py.
    arrived_states: Sequence[int] = ()
    published_states: Sequence[int] = ()  # blocks to which its states are then copied, for other engines
    # Blocks of its table that had states, which are filled with zeros before the step: as keys and values, these may be
    # NaN, and kernels read positions of a block that are not written yet.
    cleared_blocks: Sequence[int] = ()
    # With data-parallel attention: the rank that has the request's blocks and states, and computes its rows.
    dp_rank: int = 0

    @property
    def saves_states(self) -> bool:
        return self.state is not None and self.state.save_to is not None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of one KV block between the KV cache and a buffer of a lower tier, such as main memory.

    During the step only the runner may use the buffer."""

    block: int  # numbers above those of all blocks stand for pages of state slots: kv/state_pages.py
    digest: bytes  # hash of the block's content: tokens/blockhash.py
    buffer: memoryview
    group: int = 0  # group of layers whose keys and values the block has: kv/layer_groups.py
    dp_rank: int = 0  # with data-parallel attention: the rank that has the block; 0 otherwise


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine: saves of blocks to lower tiers, then loads of blocks, then the model's work.

    Saves come first, so that the same plan may overwrite a saved block."""

    step: int
    admitted: Sequence[Admission]
    work: Sequence[WorkItem]
    ended_ids: Sequence[str]  # requests whose state the runner may drop
    saves: Sequence[BlockCopy] = ()
    loads: Sequence[BlockCopy] = ()
    reports_forced: bool = False  # the result contains the tokens that grammars force next
    runs_draft_model: bool = False  # the draft model, if any, computes this step's tokens too

    @property
    def num_tokens(self) -> int:
        return sum(len(w.tokens) for w in self.work)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token and of the top alternatives, before penalties, bias and temperature."""

    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class SampledToken:
    token: int
    logprob: TokenLogprob | None = None
    stop: bool = False  # the grammar is complete with this token
    further: Sequence[SampledToken] = ()  # tokens sampled after it in the same step, while they equalled the draft


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    sampled: dict[str, SampledToken]
    # By request, one for each computed token: the log-probability of the token after it.
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # request id: why its grammar cannot be followed
    seconds: float = 0.0
    # By request, if the plan asks for it: tokens that its grammar forces next, as far as the tokenizer's usual split
    # of the forced text predicts them.
    forced: dict[str, list[int]] = field(default_factory=dict)
    # By request: tokens that the draft model proposes next. PENDING_TOKEN stands for one that only the device has.
    drafted: dict[str, Sequence[int]] = field(default_factory=dict)
    # How many kinds of steps the runner has prepared so far, which takes longer than a step. If the number changes, the
    # time since the previous result says nothing about later steps.
    num_prepared: int = 0
