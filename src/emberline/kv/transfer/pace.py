"""LinkCodecChooser: decides from measured transfers whether a link is faster with a codec.

Pure: reads no clock.
"""

from __future__ import annotations

LEAST = 1 << 20  # smaller transfers are too short to measure
AGAIN = 64  # the slower way is then tried once more, because links and load change
FRESH = 0.3  # of the moving averages


class Pace:
    def __init__(self) -> None:
        self._rates: dict[bool, float] = {}  # average bytes/s before encoding; keys: with codec, without
        self._since = 0  # transfers since the slower way was last tried

    def coded(self, size: int) -> bool:
        """Return whether to encode the next `num_bytes`. Both ways are tried first, plain before encoded."""
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
