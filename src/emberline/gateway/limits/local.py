"""LocalLimiter: exact limits in one process.

It never awaits, so that a reservation is one step of the event loop."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from emberline.gateway.errors import LimitExceeded
from emberline.gateway.limits.base import Grant, Reservation, Spent, refusal
from emberline.gateway.limits.bucket import Bucket
from emberline.gateway.limits.rule import Amount, Claim

SWEPT = 2  # buckets checked on every reservation, so that unused ones do not accumulate
FEW = 256  # with fewer buckets none is removed


class LocalLimiter:
    stats = None

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._names = itertools.count()

    async def reserve(self, claims: Sequence[Claim], now: float, hold: float) -> Reservation:
        now_ms, name = round(now * 1000), str(next(self._names))
        if len(self._buckets) > FEW:
            self._sweep(now_ms)
        expires = now_ms + round(hold * 1000)
        granted, errors = [], []
        for claim in claims:
            bucket = self._bucket(claim)
            bucket.roll(now_ms)
            amount = bucket.grant(claim.rule.limit, claim.amount)
            if amount is None:
                errors.append(_refused(claim, bucket, now_ms))
            else:
                granted.append((claim, bucket, amount))
        if errors:
            raise max(errors, key=lambda e: e.retry_after)
        return Reservation(name, tuple([_taken(*each, name, expires, now_ms) for each in granted]), expires)

    def settle(self, reservation: Reservation, actual: Mapping[Amount, int]) -> None:
        assert not reservation.settled
        reservation.settled = True
        for grant in reservation.grants:
            used = actual.get(grant.claim.rule.amount, 0)
            self._bucket(grant.claim).settle(reservation.name, grant.slot, used)

    async def spent(self, claims: Sequence[Claim], now: float) -> list[Spent]:
        return [self._spent(claim, round(now * 1000)) for claim in claims]

    async def close(self) -> None:
        pass

    @property
    def buckets(self) -> int:
        return len(self._buckets)

    def _bucket(self, claim: Claim) -> Bucket:
        key = (claim.gateway, claim.bucket)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(claim.window)
        return bucket

    def _spent(self, claim: Claim, now: int) -> Spent:
        bucket = self._bucket(claim)
        bucket.roll(now)
        return Spent(bucket.total, bucket.resets(now))

    def _sweep(self, now: int) -> None:
        for key in list(itertools.islice(self._buckets, SWEPT)):
            bucket = self._buckets.pop(key)
            bucket.roll(now)
            if not bucket.empty:
                self._buckets[key] = bucket  # at the end, so that the next sweep checks others


def _taken(claim: Claim, bucket: Bucket, amount: int, name: str, expires: int, now: int) -> Grant:
    held = bucket.take(name, amount, expires)
    return Grant(claim, held.slot, amount, claim.rule.limit - bucket.total, bucket.resets(now))


def _refused(claim: Claim, bucket: Bucket, now: int) -> LimitExceeded:
    limit = claim.rule.limit
    return refusal(claim, limit - bucket.total, bucket.waits(limit, claim.amount, now))
