"""SingleFlight: of several equal requests at the same time, only the first is sent to the provider.

The other requests wait until the reply to the first one is in the cache.
"""

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
        """Pass the outcome of the sent request on to the equal requests that wait for it.

        The outcome "left" means that the client of the sent request disconnected before the reply was complete.
        """
        if not flight.done():
            flight.set_result(outcome)
            del self._running[key]

    @staticmethod
    async def wait(flight: asyncio.Future[FlightOutcome], timeout_s: float) -> FlightOutcome | None:
        """Wait for the outcome of the sent request. Return None if it is not known after `timeout_s`."""
        await asyncio.wait((flight,), timeout=max(0.0, timeout_s))
        return flight.result() if flight.done() else None

    def __len__(self) -> int:
        return len(self._running)
