"""ExtraCost: what a request cost in addition to the reply that the client gets.

That are replies dropped for a better or faster one, and the calls of guardrail judges. The sum is added to the reply's
own cost when the reply ends; if a price is unknown, the total is marked as estimated.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.gateway.core.request import GatewayReply
from emberline.gateway.core.usage import Usage


@dataclass(slots=True)
class ExtraCost:
    micros: int = 0  # micro-dollars
    usage: Usage | None = None  # of dropped replies, not of judges
    estimated: bool = False

    async def discard(self, reply: GatewayReply) -> None:
        """Close a reply that will not be sent, and add its cost."""
        await reply.close()
        self.add_usage(reply.usage, reply.micros, estimated=reply.estimated)

    def add_usage(self, usage: Usage | None, micros: int | None, *, estimated: bool = False) -> None:
        self.micros += micros or 0
        self.estimated = self.estimated or estimated or micros is None
        if usage is not None:
            self.usage = usage if self.usage is None else self.usage.plus(usage)

    async def add_to_reply(self, reply: GatewayReply) -> None:
        """Add the extra cost to the reply. A callback for GatewayReply.close_callbacks."""
        if self.usage is not None:
            reply.usage = self.usage if reply.usage is None else reply.usage.plus(self.usage)
        if reply.micros is not None:
            reply.micros += self.micros
        reply.estimated = reply.estimated or self.estimated
