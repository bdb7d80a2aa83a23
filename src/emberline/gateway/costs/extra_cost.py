"""ExtraCost: money spent on a request in addition to the cost of the reply that the client gets.

It sums up the cost of discarded replies (such as the slower reply of two attempts) and of guardrail judges. The sum is
added to the reply's cost when the reply ends. If a price is unknown, the reply's cost is marked as an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.gateway.core.request import GatewayReply
from emberline.wire.usage import Usage


@dataclass(slots=True)
class ExtraCost:
    micros: int = 0  # micro-dollars
    usage: Usage | None = None  # of dropped replies, not of judges
    estimated: bool = False

    async def discard_reply(self, reply: GatewayReply) -> None:
        """Close a reply that will not be sent to the client, and add its cost."""
        await reply.close()
        self.add_usage(reply.usage, reply.micros, estimated=reply.estimated)

    def add_usage(self, usage: Usage | None, micros: int | None, *, estimated: bool = False) -> None:
        self.micros += micros or 0
        self.estimated = self.estimated or estimated or micros is None
        if usage is not None:
            self.usage = usage if self.usage is None else self.usage.plus(usage)

    async def add_to_reply(self, reply: GatewayReply) -> None:
        """Add the extra cost to the reply's cost. This method is a callback in `GatewayReply.close_callbacks`."""
        if self.usage is not None:
            reply.usage = self.usage if reply.usage is None else reply.usage.plus(self.usage)
        if reply.micros is not None:
            reply.micros += self.micros
        reply.estimated = reply.estimated or self.estimated
