"""interrupt_on_termination: makes SIGTERM and SIGHUP end a command as Ctrl-C does, including its cleanup."""

from __future__ import annotations

import signal


def interrupt_on_termination() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _interrupt)


def _interrupt(signal_number: int, _: object) -> None:
    """Raise KeyboardInterrupt at the first signal only: a second signal must not interrupt the cleanup."""
    signal.signal(signal_number, signal.SIG_IGN)
    raise KeyboardInterrupt
