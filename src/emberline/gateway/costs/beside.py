"""Beside: what a call cost besides the reply that is sent: those that were dropped for a better or faster one, and who
was asked for an opinion. It is added to the reply's own when that has ended; where the price of something is not known
the sum is only an estimate, and says so."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.gateway.call import Reply
from emberline.gateway.costs.usage import Usage


@dataclass(slots=True)
class Beside:
    micros: int = 0
    usage: Usage | None = None  # of those that could have been the reply
    estimated: bool = False

    async def drop(self, reply: Reply) -> None:
        """A reply that nobody will read."""
        await reply.close()
        self.count(reply.usage, reply.micros, estimated=reply.estimated)

    def count(self, usage: Usage | None, micros: int | None, *, estimated: bool = False) -> None:
        self.micros += micros or 0
        self.estimated = self.estimated or estimated or micros is None
        if usage is not None:
            self.usage = usage if self.usage is None else self.usage.plus(usage)

    async def add(self, reply: Reply) -> None:
        """An ending."""
        if self.usage is not None:
            reply.usage = self.usage if reply.usage is None else reply.usage.plus(self.usage)
        if reply.micros is not None:
            reply.micros += self.micros
        reply.estimated = reply.estimated or self.estimated
