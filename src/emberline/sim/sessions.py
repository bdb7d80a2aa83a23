"""SimSession: a simulated client. It sends one request, or the turns of a conversation, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from emberline.sim.prompt import SimRequest


class SimSession(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def starts_at(self) -> float:
        """The virtual time of its first request."""
        ...

    @property
    def turns_left(self) -> int: ...

    def next_request(self) -> SimRequest: ...

    def record_reply(self) -> None:
        """Record that the reply to the last request has ended."""
        ...

    def draw_pause_s(self) -> float:
        """Return the seconds between the reply and the next request."""
        ...


@dataclass(slots=True)
class SingleRequest:
    """A session of one request."""

    starts_at: float
    request: SimRequest
    turns_left: int = 1

    @property
    def name(self) -> str:
        return self.request.id

    def next_request(self) -> SimRequest:
        return self.request

    def record_reply(self) -> None:
        self.turns_left = 0

    def draw_pause_s(self) -> float:
        return 0.0
