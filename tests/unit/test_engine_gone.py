"""Who asks an engine in the moment of its death is told so, and nothing stays open; whatever the event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from emberline.core.config import EngineConfig, FleetConfig
from emberline.core.errors import EngineFailed, EngineUnavailable
from emberline.core.params import SamplingParams
from emberline.core.request import Priority, Submission
from emberline.engine.stream import AsyncEngine

DEAF = """
import socket, sys, time
from emberline.engine.messages import Ready, encode
engine = socket.socket(fileno=int(sys.argv[1]))
engine.recv(1 << 16)
engine.shutdown(socket.SHUT_RD)  # what is written to it from now on fails, and closes the other end's transport
engine.sendall(encode(Ready({})))
time.sleep(60)
"""

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_asked_in_the_moment_of_its_death(run: Run) -> None:
    async def main() -> None:
        engine = AsyncEngine({"m": EngineConfig("m")}, FleetConfig(), command=(sys.executable, "-c", DEAF))
        await asyncio.wait_for(engine.start(), 60)
        try:
            ends = await asyncio.wait_for(asyncio.gather(*(_ask(engine, turns) for turns in range(8))), 30)
        finally:
            await engine.stop()
        assert {*ends} == {EngineFailed, EngineUnavailable}  # the first had been sent, for all we knew
        assert engine.num_open == 0

    run(main())


async def _ask(engine: AsyncEngine, turns: int) -> type[Exception]:
    """After so many turns of the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
    submission = Submission(name := f"{turns}", [1], SamplingParams(), Priority.INTERACTIVE, "", 10.0, "m")
    try:
        async for _ in engine.submit(submission):
            pass
    except Exception as e:
        engine.pair("m", [])
        engine.watch()
        engine.abort_one(name, 0)
        return type(e)
    raise AssertionError("it ended well")
