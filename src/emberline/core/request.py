"""Request: one sequence of tokens in the engine, with the lengths that describe its progress.

    0 ...... num_cached ...... num_computed ...... num_planned ...... num_known ...... max_len
    |  [0, num_cached)             found in the cache or a lower tier, or copied from another engine  |
    |  [0, num_computed)           has its keys and values in the cache                               |
    |  [num_computed, num_planned) is being computed by steps that were launched                      |
    |  [num_planned, num_known)    is known (prompt or sampled) and not planned yet                   |
    |  num_known == len(tokens) + num_pending; the request ends at max_len                            |

Prefill and decode are not separate phases: a request samples in the step in which num_planned reaches num_known. Steps
are launched before the result of the previous one is read, so the newest token may be pending: only the device has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from emberline.core.handoff import BlockPull, PrefillResult
from emberline.core.params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    LOADING = "loading"  # has blocks, and waits for their content from a lower tier or another engine
    RUNNING = "running"
    ENDED = "ended"


class Priority(IntEnum):
    """Priority of a request: the lower value runs first.

    A batch request that has waited for `ageing_seconds` is treated like a new interactive request."""

    INTERACTIVE = 0
    BATCH = 1


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDOFF = "handoff"  # the prompt is computed and one token sampled: another engine continues


@dataclass(frozen=True, slots=True)
class Submission:
    """What a client submits to the engine: one prompt, which is completed params.n times."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: Priority = Priority.INTERACTIVE
    salt: str = ""  # tenants with different salts never share cached blocks
    timeout: float = math.inf  # seconds for the whole request, after which it ends with an error
    model: str = ""  # name of the model, where one process serves several
    resumed: tuple[tuple[int, ...], ...] = ()  # output of each of the n completions so far, from another worker
    source: dict[str, Any] | None = None  # ticket (kv.transfer.ticket) of an engine that has blocks of its tokens
    publish: bool = False  # prefill only: publish the blocks under a lease, sample one token, finish with HANDOFF
    token_timeout: float = 600.0  # seconds to the first token, and between two tokens
    prediction: tuple[int, ...] = ()  # the output that the client expects, from which tokens are drafted


@dataclass(slots=True, eq=False)
class Request:
    id: str
    submission_id: str  # shared by n requests if n > 1
    index: int  # which of the n completions
    prompt_len: int
    tokens: list[int]  # prompt, then output
    params: SamplingParams
    seed: int
    max_len: int
    priority: Priority
    salt: str
    arrival: float
    deadline: float
    token_timeout: float = math.inf  # seconds to the first token, and between two
    leader: str | None = None  # n > 1: id of the sibling that computes the prompt first
    num_resumed: int = 0  # output tokens that the submission contained
    source: dict[str, Any] | None = None  # ticket of an engine that has its blocks; None once that was tried
    prefill_result: PrefillResult | None = None  # last message of that engine
    prefill_result_len: int = 0  # tokens that precede the token of prefill_result
    pulled: BlockPull | None = None  # record of the blocks copied from that engine
    # After a failed load of its prefix from tiers: the blocks of the prefix to load at most, and until when.
    load_limit: tuple[int, float] | None = None
    publish: bool = False
    prediction: tuple[int, ...] = ()  # the output that the client expects
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0
    num_planned: int = 0
    num_pending: int = 0
    num_draft: int = 0  # drafted tokens that the newest step verifies, while that runs
    num_proposing: int = 0  # tokens that the draft model proposes in the newest step, while that runs
    can_continue_on_device: bool = False  # whether the next step may be planned before these are known
    num_cached: int = 0
    chunk_end: int = 0  # position at which a chunk of known tokens must end, for a snapshot of states; 0: anywhere
    num_drafted: int = 0  # drafted tokens that were verified since the last Output
    num_accepted: int = 0  # drafted tokens that became output since then
    admitted_at: float | None = None
    first_token_at: float | None = None
    preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks so far; used by kv.manager
    needs_sync_steps: bool = field(init=False)  # copied from params for speed
    token_deadline: float = field(init=False)  # time by which the next token must be sampled

    def __post_init__(self) -> None:
        self.token_deadline = self.arrival + self.token_timeout
        self.needs_sync_steps = self.params.needs_sync_steps

    def take_draft_counts(self) -> tuple[int, int]:
        """Return the numbers of drafted and accepted tokens since the last call."""
        counts = self.num_drafted, self.num_accepted
        self.num_drafted = self.num_accepted = 0
        return counts

    @property
    def num_known(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def submitted_len(self) -> int:
        """Length of the prompt plus the output tokens of another worker that were submitted with it."""
        return self.prompt_len + self.num_resumed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the client requested log-probabilities of the prompt and has not received them yet."""
        return self.params.prompt_logprobs is not None and self.first_token_at is None and not self.num_resumed

    @property
    def usable_prefill_result(self) -> PrefillResult | None:
        """The result of the prefill engine that computed this prompt; None if this engine must sample itself.

        The prefill engine's token becomes the first output token. It cannot be used, for example, if
        log-probabilities were requested."""
        params = self.params
        plain = (
            params.logprobs is None and params.prompt_logprobs is None and len(self.tokens) == self.prefill_result_len
        )
        return self.prefill_result if plain and self.prefill_result is not None and self.prefill_result.tokens else None

    @property
    def allows_drafts(self) -> bool:
        """Whether the request may have drafts. It has none while it only computes or scores its prompt."""
        return not (self.publish or self.needs_prompt_logprobs)

    @property
    def can_draft(self) -> bool:
        """Whether the next step may verify a draft that continues the request's tokens.

        If a token is pending, this needs a draft model on the device, which continues the pending token itself."""
        is_known = not self.num_pending or (self.num_proposing > 0 and self.can_continue_on_device)
        return is_known and self.allows_drafts

    @property
    def awaits_draft(self) -> bool:
        """Whether the result of the running step must be known before the next one is planned, because of a draft."""
        can_continue = self.num_proposing > 0 and self.can_continue_on_device
        return (self.num_draft > 0 or self.num_proposing > 0) and not can_continue

    @property
    def num_schedulable(self) -> int:
        """Number of known tokens that are not planned yet and that the next step may compute."""
        known = len(self.tokens) + self.num_pending
        if self.num_pending and (self.needs_sync_steps or self.awaits_draft or known + self.num_draft >= self.max_len):
            return 0  # the host must see the sampled tokens first, or a pending one may be the last
        return (min(known, self.chunk_end) if self.chunk_end else known) - self.num_planned

    def check_invariants(self) -> None:
        assert 0 <= self.num_cached <= self.num_computed <= self.num_planned <= self.num_known <= self.max_len, self
