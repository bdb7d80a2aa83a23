"""Journey: how a reply came to this worker, besides what its client asked for. The same name, time and seed wherever it
goes on, and what it has said before."""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass, field

from emberline.core.errors import InvalidRequest
from emberline.core.handoff import Handoff
from emberline.server.exchange import Exchange

SEED = "x-emberline-seed"
TRACK = "x-emberline-track"
CHAIN = "x-emberline-chain"


@dataclass(frozen=True, slots=True)
class Journey:
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # of the reply, without what its protocol puts before it
    created: int = field(default_factory=lambda: int(time.time()))
    seed: int | None = None  # for a call that has none of its own
    timeout: float = math.inf  # seconds that are left
    tracked: bool = False  # the stream tells which tokens its events came from
    chained: bool = False  # the reply tells where the prompt ends, in blocks
    handoff: Handoff = field(default_factory=Handoff)

    @staticmethod
    def begun_by(x: Exchange) -> Journey:
        """A router says in headers what it wants to know or to decide."""
        seed = x.header(SEED)
        if seed and not (seed.isascii() and seed.isdigit() and int(seed) < 1 << 64):
            raise InvalidRequest(f"{SEED} is {seed[:40]!r}; it must be in [0, 2**64)")
        tracked, chained = x.header(TRACK) == "1", x.header(CHAIN) == "1"
        return Journey(seed=int(seed) if seed else None, tracked=tracked, chained=chained)
