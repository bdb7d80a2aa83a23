"""RedisLimiter: limits that all replicas share.

A reservation is one call of a Lua script, which Redis runs atomically and by its own clock; a settlement is another,
whose reply is not awaited by the call.

If Redis is unavailable or refuses writes (disk or memory full, or it has become a replica), the setting redis_gone
decides: `local` counts in this process, starting from zero, so that r replicas may pass r times the limit; `closed`
refuses calls. Settlements that could not be sent are sent again when Redis is back."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any, Literal

from emberline.gateway.errors import StoreFailed
from emberline.gateway.limits.base import Grant, LimiterStats, Reservation, Spent, refusal
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.limits.rule import Amount, Claim
from emberline.gateway.redislink import LinkDown, RedisLink, RedisSaid, Script

Degraded = Literal["local", "closed"]
MOST_OWED = 10_000
AT_ONCE = 100  # settlements sent again after a reservation
LAST = 1.0  # for settlements in flight when the gateway stops


class RedisLimiter:
    def __init__(self, link: RedisLink, *, degraded: Degraded = "local", prefix: str = "emberline") -> None:
        self._link, self._degraded, self._prefix = link, degraded, prefix
        self._local = LocalLimiter()
        self._reserve, self._settle, self._spent = map(_script, ("reserve.lua", "settle.lua", "usage.lua"))
        self._owed: deque[list[str | int]] = deque()
        self._sent: set[asyncio.Future[Any]] = set()
        self.stats = LimiterStats()

    async def reserve(self, claims: Sequence[Claim], now: float, hold: float) -> Reservation:
        name = os.urandom(12).hex()
        values: list[str | int] = [name, round(hold * 1000)]
        for claim in claims:
            values += [claim.rule.limit, claim.amount, *_window(claim)]
        try:
            reply = await self._link.run(self._reserve, self._keys(claims), values)
        except (LinkDown, RedisSaid) as e:
            return await self._without(e, claims, now, hold)
        self.stats.reserved += 1
        self._pay()
        return _reservation(name, claims, reply)

    def settle(self, reservation: Reservation, actual: Mapping[Amount, int]) -> None:
        if reservation.local:
            self._local.settle(reservation, actual)
            return
        assert not reservation.settled
        reservation.settled = True
        keys = self._keys([grant.claim for grant in reservation.grants])
        arguments: list[str | int] = [len(keys), *keys, reservation.name, reservation.expires]
        for grant in reservation.grants:
            arguments += [grant.slot, grant.amount, actual.get(grant.claim.rule.amount, 0), *_window(grant.claim)]
        self._send(arguments)

    async def spent(self, claims: Sequence[Claim], now: float) -> list[Spent]:
        values: list[str | int] = [number for claim in claims for number in _window(claim)]
        try:
            reply = await self._link.run(self._spent, self._keys(claims), values)
        except (LinkDown, RedisSaid) as e:
            raise StoreFailed(f"the usage of limits cannot be read from Redis: {e.message}", hint="retry") from e
        return [Spent(*reply[2 * i : 2 * i + 2]) for i in range(len(claims))]

    async def close(self) -> None:
        self._pay()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST):
                while self._sent:  # a reply may cause another send
                    await asyncio.wait(self._sent)

    async def _without(
        self, why: LinkDown | RedisSaid, claims: Sequence[Claim], now: float, hold: float
    ) -> Reservation:
        self.stats.degraded += 1
        if self._degraded == "closed":
            raise StoreFailed(
                f"limits cannot be checked in Redis: {why.message}",
                hint="retry, or set redis_gone = 'local' in the gateway's configuration",
            ) from why
        return await self._local.reserve(claims, now, hold)

    def _keys(self, claims: Sequence[Claim]) -> list[str]:
        """Return the Redis keys of the claims; the part in braces puts all of a call on one cluster shard."""
        buckets = [f"{self._prefix}:{{{claim.gateway}}}:{claim.bucket}" for claim in claims]
        return [key for bucket in buckets for key in (f"{bucket}:used", f"{bucket}:held")]

    def _send(self, words: list[str | int], *, text: bool = False, again: bool = False) -> None:
        """Send a settlement, or queue it if Redis is unavailable.

        `with_script_text` sends the script itself, for a Redis that does not have it cached. `is_resend` marks a second
        attempt.
        """
        script = ("EVAL", self._settle.text) if text else ("EVALSHA", self._settle.sha)
        try:
            sent = self._link.post(*script, *words)
        except LinkDown:
            self._owe(words)
            return
        self._sent.add(sent)
        sent.add_done_callback(partial(self._answered, words, again))

    def _answered(self, words: list[str | int], again: bool, sent: asyncio.Future[Any]) -> None:
        """Queue a refused settlement once: a full or read-only Redis may accept it later.

        It is sent again after Redis took a reservation; if it is refused then, it is given up.
        """
        self._sent.discard(sent)
        error = None if sent.cancelled() else sent.exception()
        if isinstance(error, RedisSaid) and error.message.startswith("NOSCRIPT"):
            self._send(words, text=True, again=again)
        elif isinstance(error, LinkDown) or (error is not None and not again):
            self._owe(words)
        elif error is not None:
            self.stats.lost += 1

    def _owe(self, words: list[str | int]) -> None:
        if len(self._owed) >= MOST_OWED:
            self._owed.popleft()
            self.stats.lost += 1
        self._owed.append(words)
        self.stats.owed = len(self._owed)

    def _pay(self) -> None:
        """Send queued settlements. One that did arrive the first time is not counted twice (settle.lua)."""
        for _ in range(min(AT_ONCE, len(self._owed))):
            self._send(self._owed.popleft(), again=True)
        self.stats.owed = len(self._owed)


def _script(name: str) -> Script:
    directory = resources.files("emberline.gateway.limits")
    return Script((directory / "window.lua").read_text() + (directory / name).read_text())


def _window(claim: Claim) -> tuple[int, int, int]:
    window = claim.window
    return window.length, window.live, window.offset


def _reservation(name: str, claims: Sequence[Claim], said: list[int]) -> Reservation:
    rows = [said[5 * i : 5 * i + 5] for i in range(len(claims))]
    refused = [(wait, i) for i, (fits, _, _, _, wait) in enumerate(rows) if not fits]
    if refused:
        wait, i = max(refused)
        raise refusal(claims[i], rows[i][3], wait)
    grants = [Grant(c, slot, amount, left, ms) for c, (_, slot, amount, left, ms) in zip(claims, rows, strict=True)]
    return Reservation(name, tuple(grants), expires=said[-1], local=False)
