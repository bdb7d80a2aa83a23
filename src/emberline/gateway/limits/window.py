"""Window: the stretch of time in which a limit counts, cut into slots.

A fixed window is one slot that counts while it is the current one. A sliding window is about sixty: an amount counts
from its moment until the whole window has passed since the end of its slot, so that no stretch as long as the window
ever has more than the limit, whenever it begins; the price is that an amount may count a sixtieth too long.

Times are whole milliseconds since the epoch. Days, weeks (from Monday) and months are those of UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

Technique = Literal["fixed", "sliding"]
Period: TypeAlias = int | Literal["minute", "hour", "day", "week", "month"]

SLOTS = 60  # of a sliding window
DAY = 86_400_000
LENGTHS = {"minute": 60_000, "hour": 3_600_000, "day": DAY, "week": 7 * DAY}
MONDAY = 4 * DAY  # the first one: the epoch was a Thursday
SLIDING_MONTH = 30 * DAY


class Window(msgspec.Struct, frozen=True):
    length: int  # of a slot; 0: a month of the calendar
    live: int  # slots that count, the current one among them
    offset: int  # where a slot begins

    @staticmethod
    def of(period: Period, technique: Technique) -> Window:
        if technique == "sliding":
            whole = SLIDING_MONTH if period == "month" else _length(period)
            length = -(-whole // SLOTS)
            return Window(length, -(-whole // length) + 1, 0)
        if period == "month":
            return Window(0, 1, 0)
        return Window(_length(period), 1, MONDAY if period == "week" else 0)

    def slot(self, now: int) -> int:
        if self.length:
            return (now - self.offset) // self.length
        date = datetime.fromtimestamp(now / 1000, UTC)
        return date.year * 12 + date.month - 1

    def ends(self, slot: int) -> int:
        """When an amount of this slot no longer counts."""
        after = slot + self.live
        if self.length:
            return after * self.length + self.offset
        return int(datetime(after // 12, after % 12 + 1, 1, tzinfo=UTC).timestamp()) * 1000


def _length(period: Period) -> int:
    return period * 1000 if isinstance(period, int) else LENGTHS[period]
