"""LocalLimiter: limits that are counted in the memory of one process.

`reserve` never awaits, so no other request can run in the middle of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from emberline.gateway.core.errors import LimitExceeded
from emberline.gateway.limits.base import BucketUsage, ClaimGrant, Reservation, make_limit_exceeded_error
from emberline.gateway.limits.bucket import LimitBucket
from emberline.gateway.limits.rule import Claim, LimitUnit

SWEEP_BATCH = 2  # buckets checked on every reservation, so that unused ones do not accumulate
SWEEP_MIN_BUCKETS = 256  # with fewer buckets none is removed


class LocalLimiter:
    stats = None

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], LimitBucket] = {}
        self._ids = itertools.count()

    async def reserve(self, claims: Sequence[Claim], now: float, expires_after_s: float) -> Reservation:
        now_ms, name = round(now * 1000), str(next(self._ids))
        if len(self._buckets) > SWEEP_MIN_BUCKETS:
            self._remove_unused_buckets(now_ms)
        expires = now_ms + round(expires_after_s * 1000)
        granted, errors = [], []
        for claim in claims:
            bucket = self._get_bucket(claim)
            bucket.expire_until(now_ms)
            amount = bucket.grantable_amount(claim.rule.limit, claim.amount)
            if amount is None:
                errors.append(_make_limit_error(claim, bucket, now_ms))
            else:
                granted.append((claim, bucket, amount))
        if errors:
            raise max(errors, key=lambda e: e.retry_after)
        return Reservation(name, tuple([_grant_claim(*each, name, expires, now_ms) for each in granted]), expires)

    def settle(self, reservation: Reservation, used_amounts: Mapping[LimitUnit, int]) -> None:
        assert not reservation.is_settled
        reservation.is_settled = True
        for grant in reservation.grants:
            used = used_amounts.get(grant.claim.rule.amount, 0)
            self._get_bucket(grant.claim).settle(reservation.name, grant.slot, used)

    async def read_bucket_usage(self, claims: Sequence[Claim], now: float) -> list[BucketUsage]:
        return [self._read_usage(claim, round(now * 1000)) for claim in claims]

    async def close(self) -> None:
        pass

    @property
    def bucket_count(self) -> int:
        return len(self._buckets)

    def _get_bucket(self, claim: Claim) -> LimitBucket:
        key = (claim.gateway, claim.bucket)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = LimitBucket(claim.window)
        return bucket

    def _read_usage(self, claim: Claim, now_ms: int) -> BucketUsage:
        bucket = self._get_bucket(claim)
        bucket.expire_until(now_ms)
        return BucketUsage(bucket.total, bucket.ms_until_reset(now_ms))

    def _remove_unused_buckets(self, now_ms: int) -> None:
        for key in list(itertools.islice(self._buckets, SWEEP_BATCH)):
            bucket = self._buckets.pop(key)
            bucket.expire_until(now_ms)
            if not bucket.is_empty:
                self._buckets[key] = bucket  # at the end, so that the next sweep checks others


def _grant_claim(
    claim: Claim, bucket: LimitBucket, amount: int, reservation_name: str, expires_ms: int, now_ms: int
) -> ClaimGrant:
    held = bucket.hold_amount(reservation_name, amount, expires_ms)
    return ClaimGrant(claim, held.slot, amount, claim.rule.limit - bucket.total, bucket.ms_until_reset(now_ms))


def _make_limit_error(claim: Claim, bucket: LimitBucket, now_ms: int) -> LimitExceeded:
    limit = claim.rule.limit
    return make_limit_exceeded_error(claim, limit - bucket.total, bucket.ms_until_fits(limit, claim.amount, now_ms))
