"""A command on a connection that is just being lost fails at once, on the event loop that the gateway uses."""

from __future__ import annotations

import asyncio

import uvloop

from emberline.core.clock import ManualClock, SystemClock
from emberline.core.freeport import free_port
from emberline.gateway.redis_client import RedisClient, RedisUnavailable


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 12):
        writer.write(b"+OK\r\n")
    writer.close()


async def _lose_connection(link: RedisClient) -> None:
    assert await link.start()
    wire, refused = link._connection, 0
    assert wire is not None
    wire.close()
    for _ in range(8):
        try:
            link.send_command("GET", "a").add_done_callback(lambda answer: answer.exception())
        except RedisUnavailable:
            refused += 1
        await asyncio.sleep(0)
    assert refused and not wire.pending  # it would wait for an answer that never arrives
    while link._connection is None:
        await asyncio.sleep(0.01)
    assert await link.run_command("GET", "a") == b"OK"


def test_command_during_connection_loss_fails() -> None:
    async def main() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0)
        link = RedisClient(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", SystemClock())
        try:
            await asyncio.wait_for(_lose_connection(link), 20)
        finally:
            await link.close()
            server.close()

    uvloop.run(main())


def test_start_does_not_wait_for_a_clock_that_stands_still() -> None:
    async def main() -> bool:
        link = RedisClient(f"redis://127.0.0.1:{free_port()}", ManualClock())
        try:
            return await asyncio.wait_for(link.start(0.05), 10)
        finally:
            await link.close()

    assert asyncio.run(main()) is False
