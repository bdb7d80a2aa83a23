"""DailyUsers: limits the number of users that have rollup rows ("cells") of their own on one day.

Clients choose user names, so a day may have any number of users. For each account and day, the users with the highest
cost keep their own cells. The cells of all other users are merged into one cell per gateway. So totals stay exact, and
a query over a month reads a limited number of cells. On a day with up to twice MAX_USERS_PER_DAY users no cells are
merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add

from emberline.gateway.store.rollup import OTHER_USERS, CellKey

MAX_USERS_PER_DAY = 1000  # per account
RECHECK_AFTER_USERS = 2 * MAX_USERS_PER_DAY  # new users since the last check of a day
MAX_TRACKED_DAYS = 100

AccountDay = tuple[str, int]  # account, start in ms since 1970


class DailyUsers:
    """Tracks the users that this process has counted on each day, to find days with too many users."""

    def __init__(self) -> None:
        self._users: dict[AccountDay, set[tuple[str, str]]] = {}  # values: gateway, user

    def add_users(self, cells: Iterable[CellKey]) -> list[AccountDay]:
        """Add the users of these rollup cells.

        Return the days whose number of users must be checked: days with many new users, and days that have ended.
        """
        newest: dict[str, int] = {}
        for _, start, account, gateway, dimension, value in cells:
            if dimension == "user":
                self._users.setdefault((account, start), set()).add((gateway, value))
                newest[account] = max(start, newest.get(account, 0))
        due = [
            day
            for day, users in self._users.items()
            if len(users) >= RECHECK_AFTER_USERS or day[1] < newest.get(day[0], 0)
        ]
        for day in due:
            del self._users[day]
        while len(self._users) > MAX_TRACKED_DAYS:
            del self._users[next(iter(self._users))]
        return due


def merge_small_users(day: AccountDay, deleted_rows: Iterable[Sequence[int | str]]) -> list[tuple[int | str, ...]]:
    """Sum up the deleted rollup rows of small users, and return one new row per gateway, sorted.

    A deleted row is (gateway, counts...).
    """
    sums: dict[str, list[int]] = {}
    for gateway, *counts in deleted_rows:
        before = sums.get(str(gateway), [0] * len(counts))
        sums[str(gateway)] = list(map(add, before, map(int, counts)))
    account, start = day
    return [("day", account, "user", start, gateway, OTHER_USERS, *sums[gateway]) for gateway in sorted(sums)]
