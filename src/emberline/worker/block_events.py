"""BlockEventStream: streams to a router which KV blocks this worker's caches hold, as JSON lines."""

from __future__ import annotations

from urllib.parse import parse_qs

from emberline.core.errors import InvalidRequest
from emberline.engine.async_engine import AsyncEngine
from emberline.server.exchange import Exchange
from emberline.wire.sse import dumps

HEARTBEAT_INTERVAL_S = 1.0


class BlockEventStream:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def handle(self, exchange: Exchange) -> None:
        """Stream batches of block events until the router disconnects or the engine stops.

        If the query's `incarnation` is this run of the worker's process and the worker still has all batches after the
        number `since`, the stream starts after that batch. Otherwise it starts with a snapshot of all blocks.
        """
        query = {name: values[-1] for name, values in parse_qs(exchange.query).items()}
        since = query.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 20):
            what = f"since is {since[:40]!r}; it must be the number of a batch, such as 0"
            raise InvalidRequest(what, param="since")
        await exchange.read_body(0)
        await exchange.run_while_connected(self._stream_batches(exchange, query.get("incarnation", ""), int(since)))

    async def _stream_batches(self, exchange: Exchange, incarnation: str, since: int) -> None:
        self._engine.watch_blocks()
        ledger = self._engine.block_events
        await exchange.start_reply(200, "application/x-ndjson", {"cache-control": "no-cache"})
        while not ledger.is_closed:
            batches = ledger.batches_after(incarnation, since)
            if batches:
                incarnation, since = batches[-1].incarnation, batches[-1].seq
            for batch in batches or [ledger.make_heartbeat()]:
                await exchange.send(dumps(batch) + b"\n")
            if (incarnation, since) == (ledger.incarnation, ledger.seq) or not ledger.is_complete:
                await ledger.wait_for_change(HEARTBEAT_INTERVAL_S)
        await exchange.send(last=True)
