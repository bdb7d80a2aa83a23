"""SingleFlight: of equal calls that arrive at the same time, only one is sent.

The others wait for its reply."""

from __future__ import annotations

import asyncio
from typing import Literal

FlightOutcome = Literal["stored", "failed", "left"]


class SingleFlight:
    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[FlightOutcome]] = {}

    def get(self, key: str) -> asyncio.Future[FlightOutcome] | None:
        return self._running.get(key)

    def start(self, key: str) -> asyncio.Future[FlightOutcome]:
        assert key not in self._running
        flight = self._running[key] = asyncio.get_running_loop().create_future()
        return flight

    def finish(self, key: str, flight: asyncio.Future[FlightOutcome], outcome: FlightOutcome) -> None:
        """Wake the waiting calls with the outcome; `left`: the client of the sent call disconnected."""
        if not flight.done():
            flight.set_result(outcome)
            del self._running[key]

    @staticmethod
    async def wait(flight: asyncio.Future[FlightOutcome], timeout_s: float) -> FlightOutcome | None:
        """Return the outcome, or None if the call is still in flight after the timeout."""
        await asyncio.wait((flight,), timeout=max(0.0, timeout_s))
        return flight.result() if flight.done() else None

    def __len__(self) -> int:
        return len(self._running)
