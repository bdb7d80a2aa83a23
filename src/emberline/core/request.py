"""Request: one sequence of tokens on its way through the engine, with the lengths that say how far it is.

    0 ........ cached ........ computed ........ planned ........ known ........ limit
    |  [0, cached)         came from the cache or a lower tier, here or at its source     |
    |  [0, computed)       has its keys and values in the cache                           |
    |  [computed, planned) is being computed by steps under way                           |
    |  [planned, known)    is known (prompt, or sampled) and still to be planned          |
    |  known == len(tokens) + pending; limit is where it must end                         |

There is no prefill and no decode here: a request samples when planned catches up with known. Where steps are launched
before the last one's result is in, the newest token may be `pending`: it is on the device, but nobody here knows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from emberline.core.handoff import Note, Pulled
from emberline.core.params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"  # has its blocks, and waits for content that a lower tier or another engine has
    RUNNING = "running"
    ENDED = "ended"


class Priority(IntEnum):
    """Lower runs first; a batch request is promoted when it has waited long enough."""

    INTERACTIVE = 0
    BATCH = 1


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDOFF = "handoff"  # the prompt is computed and one token is sampled: another engine goes on


@dataclass(frozen=True, slots=True)
class Submission:
    """What a client of the engine hands in: a prompt and how to continue it, params.n times."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: Priority = Priority.INTERACTIVE
    salt: str = ""  # tenants with different salts never share cached blocks
    timeout: float = math.inf  # seconds until it ends with an error, wherever it is
    model: str = ""  # which, where there are several: engine.fleet's to read
    resumed: tuple[tuple[int, ...], ...] = ()  # output that each of the n has already, elsewhere; (): none has any
    source: dict[str, Any] | None = None  # a ticket (kv.transfer.ticket): blocks of what it comes with may be had there
    publish: bool = False  # for another engine to go on: blocks of all it comes with under a lease, one token, HANDOFF
    token_timeout: float = 600.0  # seconds to the first token, and between two tokens, until it ends with an error


@dataclass(slots=True, eq=False)
class Request:
    id: str
    parent: str  # the submission's id; several requests share one when n > 1
    index: int  # which of the n
    prompt_len: int
    tokens: list[int]  # prompt, then output
    params: SamplingParams
    seed: int
    limit: int
    priority: Priority
    salt: str
    arrival: float
    deadline: float
    token_timeout: float = math.inf  # seconds to the first token, and between two
    leader: str | None = None  # n > 1: the sibling that computes the prompt first
    resumed: int = 0  # output tokens that it came with
    source: dict[str, Any] | None = None  # where blocks of what it came with may be had; None once that was tried
    note: Note | None = None  # what its source said in the end
    note_len: int = 0  # tokens after which the note's token comes
    pulled: Pulled | None = None  # what came from there
    publish: bool = False
    status: Status = Status.WAITING
    computed: int = 0
    planned: int = 0
    pending: int = 0
    cached: int = 0
    admitted: float | None = None
    first_token: float | None = None
    preemptions: int = 0
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks so far: kv.manager's memo
    stepwise: bool = field(init=False)  # as its params say
    token_deadline: float = field(init=False)  # of the next token

    def __post_init__(self) -> None:
        self.token_deadline = self.arrival + self.token_timeout
        self.stepwise = self.params.stepwise

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def arrived_len(self) -> int:
        """Tokens that it came with: the prompt, and the output that it had already, elsewhere."""
        return self.prompt_len + self.resumed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and not yet told."""
        return self.params.prompt_logprobs is not None and self.first_token is None and not self.resumed

    @property
    def told(self) -> Note | None:
        """A note whose first token is as good as one that is sampled here."""
        params = self.params
        plain = params.logprobs is None and params.prompt_logprobs is None and len(self.tokens) == self.note_len
        return self.note if plain and self.note is not None and self.note.tokens else None

    @property
    def remaining(self) -> int:
        """Tokens the next step may compute."""
        known = len(self.tokens) + self.pending
        if self.pending and (self.stepwise or known >= self.limit):
            return 0  # the pending token must be seen first, or will be the last
        return known - self.planned

    def check(self) -> None:
        assert 0 <= self.cached <= self.computed <= self.planned <= self.known <= self.limit, self
