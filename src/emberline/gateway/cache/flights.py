"""SingleFlight: of equal calls that arrive at the same time, only one is sent.

The others wait for its reply."""

from __future__ import annotations

import asyncio
from typing import Literal

Landing = Literal["stored", "failed", "left"]


class Flights:
    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[Landing]] = {}

    def running(self, key: str) -> asyncio.Future[Landing] | None:
        return self._running.get(key)

    def begin(self, key: str) -> asyncio.Future[Landing]:
        assert key not in self._running
        flight = self._running[key] = asyncio.get_running_loop().create_future()
        return flight

    def land(self, key: str, flight: asyncio.Future[Landing], how: Landing) -> None:
        """Wake the waiting calls with the outcome; `left`: the client of the sent call disconnected."""
        if not flight.done():
            flight.set_result(how)
            del self._running[key]

    @staticmethod
    async def wait(flight: asyncio.Future[Landing], seconds: float) -> Landing | None:
        """Return the outcome, or None if the call is still in flight after the timeout."""
        await asyncio.wait((flight,), timeout=max(0.0, seconds))
        return flight.result() if flight.done() else None

    def __len__(self) -> int:
        return len(self._running)
