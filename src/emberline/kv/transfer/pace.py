"""Pace: whether a link is faster with a codec, by what it moved. Pure: seconds are handed in."""

from __future__ import annotations

LEAST = 1 << 20  # bytes of a transfer that says something about speed
AGAIN = 64  # transfers after which the slower way is tried once more: links and loads change
FRESH = 0.3  # weight of the newest transfer


class Pace:
    def __init__(self) -> None:
        self._rates: dict[bool, float] = {}  # bytes a second of what was wanted, coded or not
        self._since = 0  # transfers since both were tried

    def coded(self, size: int) -> bool:
        """How the next `size` bytes had better travel. Each way is tried first of all, plain before coded."""
        if len(self._rates) < 2:
            return size >= LEAST and False in self._rates
        faster = self._rates[True] > self._rates[False]
        return not faster if size >= LEAST and self._since >= AGAIN else faster

    def note(self, coded: bool, size: int, seconds: float) -> None:
        if size < LEAST or seconds <= 0:
            return
        rate, before = size / seconds, self._rates.get(coded)
        self._rates[coded] = rate if before is None else before + FRESH * (rate - before)
        slower = len(self._rates) == 2 and self._rates[coded] < self._rates[not coded]
        self._since = 0 if slower else self._since + 1
