"""interrupt_on_termination: SIGTERM and SIGHUP end a command like Ctrl-C, with its cleanup."""

from __future__ import annotations

import signal


def interrupt_on_termination() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    """Raise KeyboardInterrupt once: a repeated signal must not interrupt the cleanup."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
