"""LocalLimiter: limits that are counted in the memory of one process.

`reserve` never awaits, so no other request can run in the middle of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from emberline.gateway.core.errors import LimitExceeded
from emberline.gateway.limits.base import BucketUsage, Grant, Reservation, limit_error
from emberline.gateway.limits.bucket import Bucket
from emberline.gateway.limits.rule import Claim, LimitUnit

SWEEP_BATCH = 2  # buckets checked on every reservation, so that unused ones do not accumulate
SWEEP_MIN_BUCKETS = 256  # with fewer buckets none is removed


class LocalLimiter:
    stats = None

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._ids = itertools.count()

    async def reserve(self, claims: Sequence[Claim], now: float, hold_s: float) -> Reservation:
        now_ms, name = round(now * 1000), str(next(self._ids))
        if len(self._buckets) > SWEEP_MIN_BUCKETS:
            self._sweep(now_ms)
        expires = now_ms + round(hold_s * 1000)
        granted, errors = [], []
        for claim in claims:
            bucket = self._bucket(claim)
            bucket.advance(now_ms)
            amount = bucket.grantable_amount(claim.rule.limit, claim.amount)
            if amount is None:
                errors.append(_claim_error(claim, bucket, now_ms))
            else:
                granted.append((claim, bucket, amount))
        if errors:
            raise max(errors, key=lambda e: e.retry_after)
        return Reservation(name, tuple([_take_grant(*each, name, expires, now_ms) for each in granted]), expires)

    def settle(self, reservation: Reservation, actual: Mapping[LimitUnit, int]) -> None:
        assert not reservation.is_settled
        reservation.is_settled = True
        for grant in reservation.grants:
            used = actual.get(grant.claim.rule.amount, 0)
            self._bucket(grant.claim).settle(reservation.name, grant.slot, used)

    async def bucket_usage(self, claims: Sequence[Claim], now: float) -> list[BucketUsage]:
        return [self._usage_of(claim, round(now * 1000)) for claim in claims]

    async def close(self) -> None:
        pass

    @property
    def bucket_count(self) -> int:
        return len(self._buckets)

    def _bucket(self, claim: Claim) -> Bucket:
        key = (claim.gateway, claim.bucket)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(claim.window)
        return bucket

    def _usage_of(self, claim: Claim, now: int) -> BucketUsage:
        bucket = self._bucket(claim)
        bucket.advance(now)
        return BucketUsage(bucket.total, bucket.resets_in_ms(now))

    def _sweep(self, now: int) -> None:
        for key in list(itertools.islice(self._buckets, SWEEP_BATCH)):
            bucket = self._buckets.pop(key)
            bucket.advance(now)
            if not bucket.is_empty:
                self._buckets[key] = bucket  # at the end, so that the next sweep checks others


def _take_grant(claim: Claim, bucket: Bucket, amount: int, name: str, expires: int, now: int) -> Grant:
    held = bucket.take(name, amount, expires)
    return Grant(claim, held.slot, amount, claim.rule.limit - bucket.total, bucket.resets_in_ms(now))


def _claim_error(claim: Claim, bucket: Bucket, now: int) -> LimitExceeded:
    limit = claim.rule.limit
    return limit_error(claim, limit - bucket.total, bucket.wait_ms(limit, claim.amount, now))
