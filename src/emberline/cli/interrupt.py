"""interruptible: SIGTERM and SIGHUP end a command as Ctrl-C does, so that what it began is taken back."""

from __future__ import annotations

import signal


def interruptible() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    """Whoever asks again meanwhile (timeout does) must not disturb the end."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
