"""LimitWindow: the time span over which usage counts against a limit, divided into slots.

A fixed window is a single slot: its usage counts until the slot ends. A sliding window has about sixty slots: usage
counts until a whole window has passed since the end of its slot. So usage never exceeds the limit in any interval of
the window's length. In exchange, usage may count for a sixtieth of the window too long.

Times are integer milliseconds since 1970. Days, weeks (from Monday) and months are in UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

Technique = Literal["fixed", "sliding"]
Period: TypeAlias = int | Literal["minute", "hour", "day", "week", "month"]

SLIDING_SLOTS = 60  # of a sliding window
DAY_MS = 86_400_000
PERIOD_MS = {"minute": 60_000, "hour": 3_600_000, "day": DAY_MS, "week": 7 * DAY_MS}
FIRST_MONDAY_MS = 4 * DAY_MS  # the epoch was a Thursday
SLIDING_MONTH_MS = 30 * DAY_MS


class LimitWindow(msgspec.Struct, frozen=True):
    slot_ms: int  # 0 for a calendar month
    live_slots: int  # number of slots that count, including the current one
    offset_ms: int  # start of slot 0

    @staticmethod
    def for_period(period: Period, technique: Technique) -> LimitWindow:
        if technique == "sliding":
            total = SLIDING_MONTH_MS if period == "month" else _period_ms(period)
            length = -(-total // SLIDING_SLOTS)
            return LimitWindow(length, -(-total // length) + 1, 0)
        if period == "month":
            return LimitWindow(0, 1, 0)
        return LimitWindow(_period_ms(period), 1, FIRST_MONDAY_MS if period == "week" else 0)

    def slot_at(self, now_ms: int) -> int:
        if self.slot_ms:
            return (now_ms - self.offset_ms) // self.slot_ms
        date = datetime.fromtimestamp(now_ms / 1000, UTC)
        return date.year * 12 + date.month - 1

    def usage_start_ms(self, now_ms: int) -> int:
        """Return the time in milliseconds since 1970 since which usage counts at `now_ms`."""
        return self.usage_end_ms(self.slot_at(now_ms) - 2 * self.live_slots + 1)

    def usage_end_ms(self, slot: int) -> int:
        """Return the time in milliseconds since 1970 at which usage in this slot stops counting."""
        after = slot + self.live_slots
        if self.slot_ms:
            return after * self.slot_ms + self.offset_ms
        return int(datetime(after // 12, after % 12 + 1, 1, tzinfo=UTC).timestamp()) * 1000


def _period_ms(period: Period) -> int:
    return period * 1000 if isinstance(period, int) else PERIOD_MS[period]
