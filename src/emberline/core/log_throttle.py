"""LogThrottle: limits how often a log line is written that others can cause as often as they like."""

from __future__ import annotations

import logging
import threading
import time

LOG_INTERVAL_S = 10.0


class LogThrottle:
    """Writes at most one line in `interval_s` seconds, with the number of lines that were left out before it."""

    def __init__(self, log: logging.Logger, interval_s: float = LOG_INTERVAL_S) -> None:
        self._log = log
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._next_at = 0.0
        self._omitted = 0

    def write(self, level: int, message: str, *args: object) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next_at:
                self._omitted += 1
                return
            self._next_at, omitted, self._omitted = now + self._interval_s, self._omitted, 0
        if omitted:
            self._log.log(level, f"{message} similar_lines_omitted=%d", *args, omitted)
        else:
            self._log.log(level, message, *args)
