"""A workload of long conversations that share a few long system prompts, like coding agents."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

MODEL = "sim"


@dataclass(frozen=True, slots=True)
class Habits:
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
class Message:
    role: str
    tokens: list[int]

    def raw(self) -> msgspec.Raw:
        """Return the message as a client would send it, with one word for each token."""
        words = " ".join(f"{token:x}" for token in self.tokens)
        return msgspec.Raw(msgspec.json.encode({"role": self.role, "content": words}))


@dataclass(slots=True)
class Session:
    name: str
    begins: float
    turns: int
    rng: random.Random
    habits: Habits
    messages: list[Message]
    raws: list[msgspec.Raw] = field(default_factory=list)

    def ask(self) -> tuple[bytes, list[int], int]:
        """Return the next turn: the request's body, its tokens, and the length of the reply in tokens."""
        self.messages.append(Message("user", _tokens(self.rng, self._draw(self.habits.user_tokens))))
        self.raws += [message.raw() for message in self.messages[len(self.raws) :]]
        reply = self._draw(self.habits.reply_tokens)
        body = {"model": MODEL, "messages": self.raws, "max_tokens": reply, "stream": True}
        return msgspec.json.encode(body), self.tokens, reply

    @property
    def tokens(self) -> list[int]:
        return [token for message in self.messages for token in message.tokens]

    def replied(self, tokens: list[int]) -> None:
        self.turns -= 1
        self.messages.append(Message("assistant", tokens))

    def pause(self) -> float:
        return self.rng.expovariate(1.0 / self.habits.think_seconds)

    def _draw(self, middle: float) -> int:
        return max(8, round(middle * min(16.0, self.rng.lognormvariate(0.0, self.habits.spread))))


def sessions(habits: Habits, seed: int) -> list[Session]:
    rng = random.Random(seed)
    systems = [Message("system", _tokens(rng, rng.randint(*habits.system_tokens))) for _ in range(habits.systems)]
    return [
        Session(
            f"session-{i}",
            rng.uniform(0.0, habits.over_seconds),
            rng.randint(*habits.turns),
            random.Random(f"{seed}/{i}"),
            habits,
            [rng.choice(systems)],
        )
        for i in range(habits.sessions)
    ]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(count)]
