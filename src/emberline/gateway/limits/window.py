"""LimitWindow: the time span over which a limit counts, divided into slots.

A fixed window is one slot that counts while it is the current one. A sliding window has about sixty slots: usage counts
until the whole window has passed since the end of its slot. So no interval as long as the window ever exceeds the
limit, whenever it begins; in exchange, usage may count for a sixtieth of the window too long.

Times are whole milliseconds since the epoch. Days, weeks (from Monday) and months are in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

Technique = Literal["fixed", "sliding"]
Period: TypeAlias = int | Literal["minute", "hour", "day", "week", "month"]

SLOTS = 60  # of a sliding window
DAY = 86_400_000
LENGTHS = {"minute": 60_000, "hour": 3_600_000, "day": DAY, "week": 7 * DAY}
MONDAY = 4 * DAY  # the epoch was a Thursday
SLIDING_MONTH = 30 * DAY


class Window(msgspec.Struct, frozen=True):
    length: int  # 0 for a calendar month
    live: int  # number of slots that count, including the current one
    offset: int  # start of slot 0

    @staticmethod
    def of(period: Period, technique: Technique) -> Window:
        if technique == "sliding":
            total = SLIDING_MONTH if period == "month" else _length(period)
            length = -(-total // SLOTS)
            return Window(length, -(-total // length) + 1, 0)
        if period == "month":
            return Window(0, 1, 0)
        return Window(_length(period), 1, MONDAY if period == "week" else 0)

    def slot(self, now: int) -> int:
        if self.length:
            return (now - self.offset) // self.length
        date = datetime.fromtimestamp(now / 1000, UTC)
        return date.year * 12 + date.month - 1

    def ends(self, slot: int) -> int:
        """Return when usage in this slot stops counting."""
        after = slot + self.live
        if self.length:
            return after * self.length + self.offset
        return int(datetime(after // 12, after % 12 + 1, 1, tzinfo=UTC).timestamp()) * 1000


def _length(period: Period) -> int:
    return period * 1000 if isinstance(period, int) else LENGTHS[period]
