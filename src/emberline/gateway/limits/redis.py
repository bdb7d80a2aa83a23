"""RedisLimiter: limits that all replicas share.

A reservation is one call of a Lua script, which Redis runs atomically and with its own clock. A settlement is a second
call; the request does not wait for its reply.

If Redis is unavailable or refuses writes (its disk or memory is full, or it has become a replica), the setting
`redis_gone` decides. With `local` this process counts alone, starting from zero, so r replicas may admit r times the
limit. With `closed` requests are refused. Settlements that could not be sent are sent when Redis is available again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any, Literal

from emberline.gateway.core.errors import StoreFailed
from emberline.gateway.limits.base import BucketUsage, ClaimGrant, LimiterStats, Reservation, make_limit_exceeded_error
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.limits.rule import Claim, LimitUnit
from emberline.gateway.redis_client import RedisClient, RedisErrorReply, RedisScript, RedisUnavailable

DegradedMode = Literal["local", "closed"]
MAX_PENDING_SETTLEMENTS = 10_000
RESEND_BATCH = 100  # settlements sent again after a reservation
CLOSE_TIMEOUT_S = 1.0  # for settlements in flight when the gateway stops


class RedisLimiter:
    def __init__(
        self, client: RedisClient, *, degraded_mode: DegradedMode = "local", prefix: str = "emberline"
    ) -> None:
        self._client, self._degraded, self._prefix = client, degraded_mode, prefix
        self._local = LocalLimiter()
        self._reserve_script, self._settle_script, self._usage_script = map(
            _load_script, ("reserve.lua", "settle.lua", "usage.lua")
        )
        self._pending: deque[list[str | int]] = deque()
        self._in_flight: set[asyncio.Future[Any]] = set()
        self.stats = LimiterStats()

    async def reserve(self, claims: Sequence[Claim], now: float, expires_after_s: float) -> Reservation:
        name = os.urandom(12).hex()
        values: list[str | int] = [name, round(expires_after_s * 1000)]
        for claim in claims:
            values += [claim.rule.limit, claim.amount, *_window_arguments(claim)]
        try:
            reply = await self._client.run_script(self._reserve_script, self._redis_keys(claims), values)
        except (RedisUnavailable, RedisErrorReply) as e:
            return await self._reserve_degraded(e, claims, now, expires_after_s)
        self.stats.reserved += 1
        self._resend_pending()
        return _parse_reservation(name, claims, reply)

    def settle(self, reservation: Reservation, used_amounts: Mapping[LimitUnit, int]) -> None:
        if reservation.is_local:
            self._local.settle(reservation, used_amounts)
            return
        assert not reservation.is_settled
        reservation.is_settled = True
        keys = self._redis_keys([grant.claim for grant in reservation.grants])
        arguments: list[str | int] = [len(keys), *keys, reservation.name, reservation.expires]
        for grant in reservation.grants:
            arguments += [
                grant.slot,
                grant.amount,
                used_amounts.get(grant.claim.rule.amount, 0),
                *_window_arguments(grant.claim),
            ]
        self._send_settlement(arguments)

    async def read_bucket_usage(self, claims: Sequence[Claim], now: float) -> list[BucketUsage]:
        values: list[str | int] = [number for claim in claims for number in _window_arguments(claim)]
        try:
            reply = await self._client.run_script(self._usage_script, self._redis_keys(claims), values)
        except (RedisUnavailable, RedisErrorReply) as e:
            raise StoreFailed(f"the usage of limits cannot be read from Redis: {e.message}", hint="retry") from e
        return [BucketUsage(*reply[2 * i : 2 * i + 2]) for i in range(len(claims))]

    async def close(self) -> None:
        self._resend_pending()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._in_flight:  # a reply may cause another send
                    await asyncio.wait(self._in_flight)

    async def _reserve_degraded(
        self, error: RedisUnavailable | RedisErrorReply, claims: Sequence[Claim], now: float, expires_after_s: float
    ) -> Reservation:
        self.stats.degraded += 1
        if self._degraded == "closed":
            raise StoreFailed(
                f"limits cannot be checked in Redis: {error.message}",
                hint="retry, or set redis_gone = 'local' in the gateway's configuration",
            ) from error
        return await self._local.reserve(claims, now, expires_after_s)

    def _redis_keys(self, claims: Sequence[Claim]) -> list[str]:
        """Return the Redis keys of the claims.

        The part in braces is the same for all claims of a request, so that a Redis cluster keeps them on one shard.
        """
        buckets = [f"{self._prefix}:{{{claim.gateway}}}:{claim.bucket}" for claim in claims]
        return [key for bucket in buckets for key in (f"{bucket}:used", f"{bucket}:held")]

    def _send_settlement(
        self, script_arguments: list[str | int], *, with_script_text: bool = False, is_resend: bool = False
    ) -> None:
        """Send a settlement to Redis, or queue it if Redis is unavailable.

        `with_script_text`: send the whole script, because Redis does not have it cached. `is_resend`: this is the
        second attempt.
        """
        script = ("EVAL", self._settle_script.text) if with_script_text else ("EVALSHA", self._settle_script.sha)
        try:
            sent = self._client.send_command(*script, *script_arguments)
        except RedisUnavailable:
            self._queue_settlement(script_arguments)
            return
        self._in_flight.add(sent)
        sent.add_done_callback(partial(self._on_settlement_reply, script_arguments, is_resend))

    def _on_settlement_reply(
        self, script_arguments: list[str | int], is_resend: bool, reply: asyncio.Future[Any]
    ) -> None:
        """Handle Redis's reply to a settlement. Queue a refused settlement, so that it is sent once more.

        A full or read-only Redis may accept the settlement later, so it is sent again after the next reservation that
        Redis accepts. A settlement that is refused twice is given up.
        """
        self._in_flight.discard(reply)
        error = None if reply.cancelled() else reply.exception()
        if isinstance(error, RedisErrorReply) and error.message.startswith("NOSCRIPT"):
            self._send_settlement(script_arguments, with_script_text=True, is_resend=is_resend)
        elif isinstance(error, RedisUnavailable) or (error is not None and not is_resend):
            self._queue_settlement(script_arguments)
        elif error is not None:
            self.stats.lost_settlements += 1

    def _queue_settlement(self, script_arguments: list[str | int]) -> None:
        if len(self._pending) >= MAX_PENDING_SETTLEMENTS:
            self._pending.popleft()
            self.stats.lost_settlements += 1
        self._pending.append(script_arguments)
        self.stats.pending_settlements = len(self._pending)

    def _resend_pending(self) -> None:
        """Send the queued settlements. `settle.lua` ignores a settlement that Redis has already executed."""
        for _ in range(min(RESEND_BATCH, len(self._pending))):
            self._send_settlement(self._pending.popleft(), is_resend=True)
        self.stats.pending_settlements = len(self._pending)


def _load_script(name: str) -> RedisScript:
    directory = resources.files("emberline.gateway.limits")
    return RedisScript((directory / "window.lua").read_text() + (directory / name).read_text())


def _window_arguments(claim: Claim) -> tuple[int, int, int]:
    window = claim.window
    return window.slot_ms, window.live_slots, window.offset_ms


def _parse_reservation(reservation_name: str, claims: Sequence[Claim], reply: list[int]) -> Reservation:
    rows = [reply[5 * i : 5 * i + 5] for i in range(len(claims))]
    refused = [(wait, i) for i, (fits, _, _, _, wait) in enumerate(rows) if not fits]
    if refused:
        wait, i = max(refused)
        raise make_limit_exceeded_error(claims[i], rows[i][3], wait)
    grants = [
        ClaimGrant(c, slot, amount, left, ms) for c, (_, slot, amount, left, ms) in zip(claims, rows, strict=True)
    ]
    return Reservation(reservation_name, tuple(grants), expires=reply[-1], is_local=False)
