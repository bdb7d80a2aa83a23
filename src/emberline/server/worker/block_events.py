"""BlockEvents: tells a router what this worker's caches hold, line by line, for as long as it listens."""

from __future__ import annotations

from urllib.parse import parse_qs

from emberline.api.sse import dumps
from emberline.core.errors import InvalidRequest
from emberline.engine.stream import AsyncEngine
from emberline.server.exchange import Exchange

BEAT = 1.0  # seconds between two signs of life


class BlockEvents:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def follow(self, x: Exchange) -> None:
        """`?incarnation=...&since=...`: the last batch that whoever asks has; what came after it is told first."""
        given = {name: values[-1] for name, values in parse_qs(x.query).items()}
        since = given.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 20):
            raise InvalidRequest(f"since is {since[:40]!r}; it must be the number of a batch", param="since")
        await x.body(0)
        await x.while_connected(self._tell(x, given.get("incarnation", ""), int(since)))

    async def _tell(self, x: Exchange, incarnation: str, seq: int) -> None:
        self._engine.watch()
        ledger = self._engine.ledger
        await x.start(200, "application/x-ndjson", {"cache-control": "no-cache"})
        while not ledger.closed:
            batches = ledger.after(incarnation, seq)
            if batches:
                incarnation, seq = batches[-1].incarnation, batches[-1].seq
            for batch in batches or [ledger.sign()]:
                await x.send(dumps(batch) + b"\n")
            if (incarnation, seq) == (ledger.incarnation, ledger.seq) or not ledger.complete:
                await ledger.news(BEAT)
        await x.send(last=True)
