"""DownloadProgress: shows a download on stderr, as a bar on a terminal, else as a line per ten percent."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

BAR_WIDTH = 28
REDRAW_INTERVAL_S = 0.1

ReportBytes = Callable[[int, int], None]  # takes the bytes so far, and those of the whole download
ShowProgress = bool | ReportBytes  # whether to show a download on stderr, or the function to call instead


class DownloadProgress:
    def __init__(
        self, label: str, total_bytes: int, enabled: ShowProgress = True, stream: TextIO | None = None
    ) -> None:
        self.label, self.total_bytes, self.done_bytes = label, max(total_bytes, 1), 0
        self.stream = stream or sys.stderr
        self.enabled, self.bar = enabled is True, self.stream.isatty()
        self._report = None if isinstance(enabled, bool) else enabled
        self._started_at, self._drawn_at, self._last_tenth, self._resumed_bytes = time.monotonic(), 0.0, -1, 0

    def resume(self, resumed_bytes: int) -> None:
        """Count the bytes that an earlier, interrupted download left. They do not count for the speed."""
        self.done_bytes = self._resumed_bytes = resumed_bytes

    def add_bytes(self, byte_count: int) -> None:
        self.done_bytes += byte_count
        if self._report is not None:
            self._report(self.done_bytes, self.total_bytes)
        if not self.enabled:
            return
        now = time.monotonic()
        tenth = min(10, 10 * self.done_bytes // self.total_bytes)
        if self.bar and (now - self._drawn_at >= REDRAW_INTERVAL_S or self.done_bytes >= self.total_bytes):
            self._drawn_at = now
            self.stream.write("\r" + self._render_bar(now))
        elif not self.bar and tenth > self._last_tenth:
            self.stream.write(f"{self.label}: {10 * tenth}% of {self.total_bytes / 1e6:.1f} MB\n")
        self._last_tenth = tenth
        self.stream.flush()

    def close(self) -> None:
        if self.enabled and self.bar and self._drawn_at:
            self.stream.write("\n")

    def _render_bar(self, now: float) -> str:
        part = min(1.0, self.done_bytes / self.total_bytes)
        full = int(part * BAR_WIDTH)
        speed = (self.done_bytes - self._resumed_bytes) / max(now - self._started_at, 1e-3)
        bar = "█" * full + "░" * (BAR_WIDTH - full)
        size = f"{self.done_bytes / 1e6:.1f}/{self.total_bytes / 1e6:.1f} MB"
        return f"{self.label} {bar} {part:4.0%}  {size}  {speed / 1e6:.1f} MB/s "
