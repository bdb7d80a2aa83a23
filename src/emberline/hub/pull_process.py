"""Downloads a model in a process of its own, for servers: `python -m emberline.hub.pull_process NAME`.

A server can end the process at any time, and the next one resumes the download. It writes lines of JSON to stdout: the
progress, then the directory of the model or the error.
"""

from __future__ import annotations

import sys
import time

import msgspec

from emberline.core.errors import EmberlineError
from emberline.core.parent_death import end_with_parent
from emberline.hub.source import resolve_model

REPORT_INTERVAL_S = 0.2


class PullReport(msgspec.Struct, omit_defaults=True):
    """A line of the process's output."""

    completed: int = 0  # bytes
    total: int = 0  # bytes; 0: not known yet
    directory: str = ""  # of the model, at the end
    error: str = ""
    hint: str = ""
    code: str = ""  # of the error
    status: int = 0  # HTTP status of the error


def main(name: str) -> int:
    end_with_parent()
    reported_at = 0.0

    def report_progress(completed: int, total: int) -> None:
        nonlocal reported_at
        now = time.monotonic()
        if now - reported_at >= REPORT_INTERVAL_S or completed >= total:
            reported_at = now
            _write(PullReport(completed, total))

    try:
        directory = resolve_model(name, show_progress=report_progress)
    except EmberlineError as error:
        _write(PullReport(error=error.message, hint=error.hint or "", code=error.code, status=error.status))
        return 1
    _write(PullReport(directory=str(directory)))
    return 0


def _write(report: PullReport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
