"""TrainingProgress: shows the phase, step, loss, acceptance, speed and time left on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from emberline.drafter.report import acceptance_length

BAR_WIDTH = 24
REDRAW_INTERVAL_S, LINE_INTERVAL_S = 0.5, 10.0  # on a terminal; elsewhere


class TrainingProgress:
    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._enabled, self._is_terminal = enabled, self._stream.isatty()
        self._shown_at = 0.0
        self._open_bar = False
        self.start_steps(0)

    def write_line(self, text: str) -> None:
        """Write one line, below the bar if there is one."""
        self.close()
        if self._enabled:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def start_steps(self, first_step: int) -> None:
        """Start to measure the speed of training, which begins or continues at this step."""
        self._first_step, self._tokens, self._began = first_step, 0, time.monotonic()

    def show_step(self, step: int, total: int, tokens: int, read: Callable[[], tuple[float, list[float]]]) -> None:
        """Count a training step of `tokens` tokens, and show it unless another was shown just before.

        `read`: returns the loss and the share of matching tokens of each pass; on a GPU it waits for the step."""
        now = time.monotonic()
        self._tokens += tokens
        interval = REDRAW_INTERVAL_S if self._is_terminal else LINE_INTERVAL_S
        if not self._enabled or (now - self._shown_at < interval and step < total):
            return
        self._shown_at = now
        loss, matches = read()
        seconds = time.monotonic() - self._began
        left = seconds / (step - self._first_step) * (total - step)
        facts = (
            f"step {step}/{total}  loss {loss:.3f}  a1 {matches[0]:.3f}  length {acceptance_length(matches):.2f}"
            f"  {self._tokens / seconds:,.0f} tok/s  {int(left) // 60}:{int(left) % 60:02} left"
        )
        if self._is_terminal:
            filled = BAR_WIDTH * step // total
            self._stream.write(f"\r\x1b[Ktrain {'█' * filled}{'░' * (BAR_WIDTH - filled)} {facts}")
            self._open_bar = True
        else:
            self._stream.write(f"train: {facts}\n")
        self._stream.flush()

    def close(self) -> None:
        if self._open_bar:
            self._stream.write("\n")
            self._open_bar = False
