"""AgentWorkload: long conversations that share a few long system prompts, like those of coding agents."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

MODEL_NAME = "sim"


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    sessions: int = 160
    systems: int = 8  # distinct system prompts
    system_tokens: tuple[int, int] = (2048, 4096)
    turns: tuple[int, int] = (10, 20)
    user_tokens: float = 220.0  # median per turn, including tool results; log-normal
    reply_tokens: float = 120.0  # median per turn; log-normal
    spread: float = 0.7  # sigma of both distributions
    think_seconds: float = 8.0  # mean pause between a reply and the next turn; exponential
    over_seconds: float = 240.0  # time window in which the sessions start


@dataclass(slots=True)
class SimMessage:
    role: str
    tokens: list[int]

    def to_json(self) -> msgspec.Raw:
        """Return the message as JSON, with one word for each token."""
        words = " ".join(f"{token:x}" for token in self.tokens)
        return msgspec.Raw(msgspec.json.encode({"role": self.role, "content": words}))


@dataclass(slots=True)
class AgentSession:
    name: str
    starts_at: float
    turns_left: int
    rng: random.Random
    workload: AgentWorkload
    messages: list[SimMessage]
    encoded_messages: list[msgspec.Raw] = field(default_factory=list)

    def next_request(self) -> tuple[bytes, list[int], int]:
        """Add a user message to the conversation, and return the request for the next reply.

        The request is returned as its JSON body, the tokens of its prompt, and the number of tokens that the reply will
        have."""
        self.messages.append(
            SimMessage("user", _draw_tokens(self.rng, self._draw_token_count(self.workload.user_tokens)))
        )
        self.encoded_messages += [message.to_json() for message in self.messages[len(self.encoded_messages) :]]
        reply = self._draw_token_count(self.workload.reply_tokens)
        body = {"model": MODEL_NAME, "messages": self.encoded_messages, "max_tokens": reply, "stream": True}
        return msgspec.json.encode(body), self.conversation_tokens, reply

    @property
    def conversation_tokens(self) -> list[int]:
        return [token for message in self.messages for token in message.tokens]

    def record_reply(self, tokens: list[int]) -> None:
        self.turns_left -= 1
        self.messages.append(SimMessage("assistant", tokens))

    def draw_pause_s(self) -> float:
        return self.rng.expovariate(1.0 / self.workload.think_seconds)

    def _draw_token_count(self, median: float) -> int:
        return max(8, round(median * min(16.0, self.rng.lognormvariate(0.0, self.workload.spread))))


def create_sessions(workload: AgentWorkload, seed: int) -> list[AgentSession]:
    rng = random.Random(seed)
    systems = [
        SimMessage("system", _draw_tokens(rng, rng.randint(*workload.system_tokens))) for _ in range(workload.systems)
    ]
    return [
        AgentSession(
            f"session-{i}",
            rng.uniform(0.0, workload.over_seconds),
            rng.randint(*workload.turns),
            random.Random(f"{seed}/{i}"),
            workload,
            [rng.choice(systems)],
        )
        for i in range(workload.sessions)
    ]


def _draw_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(count)]
