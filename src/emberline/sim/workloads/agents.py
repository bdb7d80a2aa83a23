"""AgentWorkload: long conversations that share a few long system prompts, like those of coding agents."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from emberline.core.errors import InvalidRequest
from emberline.sim.prompt import PromptSegment, SimPromptBuilder, SimRequest
from emberline.sim.workloads.arrivals import ArrivalRate, draw_arrivals
from emberline.sim.workloads.requests import check_median_tokens, check_spread


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    num_sessions: int = 160
    systems: int = 8  # distinct system prompts
    system_tokens: tuple[int, int] = (2048, 4096)
    turns: tuple[int, int] = (10, 20)
    user_tokens: float = 220.0  # median per turn, including tool results; log-normal
    reply_tokens: float = 120.0  # median per turn; log-normal
    spread: float = 0.7  # sigma of both distributions
    think_seconds: float = 8.0  # mean pause between a reply and the next turn; exponential
    over_seconds: float = 240.0  # time window in which the sessions start
    # Rate at which sessions start, instead of `num_sessions` at random times.
    arrivals: ArrivalRate | None = None

    def __post_init__(self) -> None:
        for name in ("num_sessions", "systems"):
            if getattr(self, name) < 1:
                label = name.removeprefix("num_")
                raise InvalidRequest(f"{label} is {getattr(self, name)}; it must be at least 1", param=label)
        if self.turns[0] < 1 or self.system_tokens[0] < 1:
            message = f"turns is {self.turns} and system is {self.system_tokens}; they must be at least 1"
            raise InvalidRequest(message, param="turns")
        check_spread(self.spread)
        for label, value in (("user", self.user_tokens), ("output", self.reply_tokens)):
            if not value >= 1:
                raise InvalidRequest(f"{label} is {value:g}; it must be at least 1", param=label)
            check_median_tokens(label, value)
        if self.over_seconds < 0 or self.think_seconds <= 0:
            message = (
                f"seconds is {self.over_seconds:g} and think is {self.think_seconds:g};"
                " seconds must be at least 0, and think above 0"
            )
            raise InvalidRequest(message, param="think")

    def sessions(self, seed: int) -> Iterator[AgentSession]:
        """Yield the conversations in the order of their start."""
        rng = random.Random(seed)
        systems = [PromptSegment(f"{seed}/system-{i}", rng.randint(*self.system_tokens)) for i in range(self.systems)]
        for i, time in enumerate(self._draw_starts(rng)):
            turns, system = rng.randint(*self.turns), rng.choice(systems)
            yield AgentSession(f"session-{i}", time, turns, random.Random(rng.getrandbits(64)), self, system)

    def _draw_starts(self, rng: random.Random) -> Iterable[float]:
        if self.arrivals is not None:
            return draw_arrivals(self.arrivals, self.over_seconds, rng)
        return sorted(rng.uniform(0.0, self.over_seconds) for _ in range(self.num_sessions))


@dataclass(slots=True)
class AgentSession:
    name: str
    starts_at: float
    turns_left: int
    rng: random.Random
    workload: AgentWorkload
    system: PromptSegment
    _prompt: SimPromptBuilder = field(default_factory=SimPromptBuilder)
    _reply: PromptSegment | None = None  # reply to the last request

    def next_request(self) -> SimRequest:
        """Add a user message to the conversation, and return the request for the next reply."""
        if not self._prompt.segments:
            self._prompt.add(self.system)
        turn, workload = f"{self.name}/{self.turns_left}", self.workload
        if self._reply is not None:
            self._prompt.add(self._reply)
        self._prompt.add(PromptSegment(f"{turn}/user", self._draw_token_count(workload.user_tokens)))
        self._reply = PromptSegment(f"{turn}/reply", self._draw_token_count(workload.reply_tokens))
        return self._prompt.build_request(turn, self._reply)

    def record_reply(self) -> None:
        self.turns_left -= 1

    def draw_pause_s(self) -> float:
        return self.rng.expovariate(1.0 / self.workload.think_seconds)

    def _draw_token_count(self, median: float) -> int:
        return max(8, round(median * min(16.0, self.rng.lognormvariate(0.0, self.workload.spread))))
