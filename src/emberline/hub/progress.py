"""DownloadProgress: shows a download on stderr, as a bar on a terminal, else as a line per ten percent."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 28
REDRAW_SECONDS = 0.1


class Progress:
    def __init__(self, label: str, total: int, wanted: bool = True, stream: TextIO | None = None) -> None:
        self.label, self.total, self.done = label, max(total, 1), 0
        self.stream = stream or sys.stderr
        self.wanted, self.bar = wanted, self.stream.isatty()
        self._started, self._drawn, self._tenth, self._resumed = time.monotonic(), 0.0, -1, 0

    def resume(self, done: int) -> None:
        """Count bytes of an earlier, interrupted download, which do not count for the speed."""
        self.done = self._resumed = done

    def add(self, n: int) -> None:
        self.done += n
        if not self.wanted:
            return
        now = time.monotonic()
        tenth = min(10, 10 * self.done // self.total)
        if self.bar and (now - self._drawn >= REDRAW_SECONDS or self.done >= self.total):
            self._drawn = now
            self.stream.write("\r" + self._line(now))
        elif not self.bar and tenth > self._tenth:
            self.stream.write(f"{self.label}: {10 * tenth}% of {self.total / 1e6:.1f} MB\n")
        self._tenth = tenth
        self.stream.flush()

    def close(self) -> None:
        if self.wanted and self.bar and self._drawn:
            self.stream.write("\n")

    def _line(self, now: float) -> str:
        part = min(1.0, self.done / self.total)
        full = int(part * WIDTH)
        speed = (self.done - self._resumed) / max(now - self._started, 1e-3)
        bar = "█" * full + "░" * (WIDTH - full)
        size = f"{self.done / 1e6:.1f}/{self.total / 1e6:.1f} MB"
        return f"{self.label} {bar} {part:4.0%}  {size}  {speed / 1e6:.1f} MB/s "
