"""LinkCodecChooser: decides from measured transfers whether a link is faster with compressed data."""

from __future__ import annotations

MIN_MEASURED_BYTES = 1 << 20  # smaller transfers are too short to measure
RETRY_AFTER_TRANSFERS = 64  # the slower way is then tried once more, because links and load change
NEWEST_SAMPLE_WEIGHT = 0.3  # of the moving averages


class LinkCodecChooser:
    def __init__(self) -> None:
        self._rates: dict[bool, float] = {}  # average bytes/s before encoding; keys: with codec, without
        self._transfers_since_retry = 0  # transfers since the slower way was last tried

    def should_encode(self, num_bytes: int) -> bool:
        """Return whether to compress the next `num_bytes`.

        At first, transfers without and with compression are both tried.
        """
        if len(self._rates) < 2:
            return num_bytes >= MIN_MEASURED_BYTES and False in self._rates
        faster = self._rates[True] > self._rates[False]
        return (
            not faster
            if num_bytes >= MIN_MEASURED_BYTES and self._transfers_since_retry >= RETRY_AFTER_TRANSFERS
            else faster
        )

    def record_transfer(self, was_encoded: bool, num_bytes: int, seconds: float) -> None:
        if num_bytes < MIN_MEASURED_BYTES or seconds <= 0:
            return
        rate, before = num_bytes / seconds, self._rates.get(was_encoded)
        self._rates[was_encoded] = rate if before is None else before + NEWEST_SAMPLE_WEIGHT * (rate - before)
        slower = len(self._rates) == 2 and self._rates[was_encoded] < self._rates[not was_encoded]
        self._transfers_since_retry = 0 if slower else self._transfers_since_retry + 1
