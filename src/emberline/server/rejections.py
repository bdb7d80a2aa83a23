"""RejectionLog: one log line for each rejected request. WrongKeyDelay: slows down callers that guess keys.

A client without a key can cause both, so both are bounded: the log in lines, the delay in memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from emberline.core.clock import Clock, SystemClock
from emberline.core.error_texts import printable_error
from emberline.server.exchange import Exchange
from emberline.server.metrics import MetricFamily

MAX_LINES, LINES_PER_S = 200, 20.0  # of all clients: at once, and refilled
MAX_CLIENT_LINES, CLIENT_LINES_PER_S = 50, 2.0  # of one address, so that one client cannot use up the lines of others
MAX_CLIENTS = 1000  # addresses whose lines are counted
MAX_PATH_CHARS = 200

FREE_WRONG_KEYS, WRONG_KEYS_PER_S = 10.0, 1.0  # without delay: at once, and refilled
DELAY_PER_WRONG_KEY_S, MAX_DELAY_S = 0.1, 2.0
MAX_DELAYED_REPLIES = 1000


@dataclass(slots=True)
class _Allowance:
    """A number of units that is used up and refilled at a constant rate."""

    maximum: float
    per_s: float
    left: float
    updated_at: float

    def refill(self, now: float) -> None:
        self.left = min(self.maximum, self.left + (now - self.updated_at) * self.per_s)
        self.updated_at = now


class RejectionLog:
    def __init__(self, log: logging.Logger, clock: Clock | None = None) -> None:
        self._log = log
        self._clock = clock or SystemClock()
        self._lines = _Allowance(MAX_LINES, LINES_PER_S, MAX_LINES, self._clock.now())
        self._lines_of_client: OrderedDict[str, _Allowance] = OrderedDict()  # the least recently used first
        self._suppressed_count = 0

    def record(self, exchange: Exchange, status: int, code: str, message: str) -> None:
        """Log a rejected request, unless too many were logged recently. The next line then says how many are missing.

        The query is not logged, because it may contain a key.
        """
        if not self._take_line(exchange.client):
            self._suppressed_count += 1
            return
        if self._suppressed_count:
            self._log.warning("Rejected requests not logged: count=%d", self._suppressed_count)
            self._suppressed_count = 0
        path = printable_error(exchange.path[:MAX_PATH_CHARS]).replace(" ", "%20")
        facts = (exchange.method[:20], path, status, exchange.client, code)
        shown = json.dumps(printable_error(message), ensure_ascii=False)
        level = logging.WARNING if status >= 500 or status == 401 else logging.INFO
        self._log.log(
            level, "Request rejected: method=%s path=%s status=%d client=%s error=%s message=%s", *facts, shown
        )

    def _take_line(self, client: str) -> bool:
        now = self._clock.now()
        own = self._lines_of_client.pop(client, None)
        own = own or _Allowance(MAX_CLIENT_LINES, CLIENT_LINES_PER_S, MAX_CLIENT_LINES, now)
        self._lines_of_client[client] = own
        if len(self._lines_of_client) > MAX_CLIENTS:
            self._lines_of_client.popitem(last=False)
        own.refill(now)
        self._lines.refill(now)
        if own.left < 1 or self._lines.left < 1:
            return False
        own.left -= 1
        self._lines.left -= 1
        return True


class WrongKeyDelay:
    """Delays replies to requests with a wrong key, the longer the more of them have arrived recently.

    Requests with a right key are never delayed, so guesses cannot lock out the operator.
    """

    def __init__(self, clock: Clock | None = None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._clock = clock or SystemClock()
        self._sleep = sleep
        maximum = FREE_WRONG_KEYS
        self._allowance = _Allowance(maximum, WRONG_KEYS_PER_S, maximum, self._clock.now())
        self._delayed_count = 0
        self.count = 0

    async def wait(self) -> None:
        """Count a wrong key, and wait before the reply."""
        self.count += 1
        self._allowance.refill(self._clock.now())
        lowest = -MAX_DELAY_S / DELAY_PER_WRONG_KEY_S
        self._allowance.left = max(self._allowance.left - 1, lowest)
        delay = -self._allowance.left * DELAY_PER_WRONG_KEY_S
        if delay <= 0 or self._delayed_count >= MAX_DELAYED_REPLIES:
            return
        self._delayed_count += 1
        try:
            await self._sleep(delay)
        finally:
            self._delayed_count -= 1

    def family(self) -> MetricFamily:
        name = "emberline:wrong_keys_total"
        return MetricFamily(name, "Requests with a wrong, expired or revoked key.", "counter", [f"{name} {self.count}"])
