"""Crowd: the users of a day, of whom there may be any number: their names come from clients. An account's day keeps
those that cost most apart; the others are added up in one cell of each gateway, so that sums stay right and a page over
a month reads a bounded number of cells. Of a day with up to twice KEPT users each one's sums are exact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add

from emberline.gateway.store.rollup import OTHERS, Place

KEPT = 1000  # users of an account and day
AGAIN = 2 * KEPT  # seen on a day: then it is looked at once more
MOST_DAYS = 100  # that are watched

Day = tuple[str, int]  # account, start


class Crowd:
    """Which users a process has counted on which day, so as to know when they may have become too many."""

    def __init__(self) -> None:
        self._seen: dict[Day, set[tuple[str, str]]] = {}

    def add(self, cells: Iterable[Place]) -> list[Day]:
        """Days to look at: many users have come since the last time, or the account's next day has begun."""
        newest: dict[str, int] = {}
        for _, start, account, gateway, dimension, value in cells:
            if dimension == "user":
                self._seen.setdefault((account, start), set()).add((gateway, value))
                newest[account] = max(start, newest.get(account, 0))
        due = [day for day, users in self._seen.items() if len(users) >= AGAIN or day[1] < newest.get(day[0], 0)]
        for day in due:
            del self._seen[day]
        while len(self._seen) > MOST_DAYS:
            del self._seen[next(iter(self._seen))]
        return due


def others(day: Day, gone: Iterable[Sequence[int | str]]) -> list[tuple[int | str, ...]]:
    """Rows (gateway, counts...) that were taken out, as rows of a rollup: one for each gateway, in order."""
    sums: dict[str, list[int]] = {}
    for gateway, *counts in gone:
        before = sums.get(str(gateway), [0] * len(counts))
        sums[str(gateway)] = list(map(add, before, map(int, counts)))
    account, start = day
    return [("day", account, "user", start, gateway, OTHERS, *sums[gateway]) for gateway in sorted(sums)]
