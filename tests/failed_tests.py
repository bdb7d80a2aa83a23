"""Lists the failed tests of a run in a file, from which scripts/test runs them once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAILED = ("failed", "error")  # categories of the terminal reporter


def write_failed_tests(reporter: Any, path: Path) -> None:
    """Write the ids of the run's failed tests, one in a line and each once."""
    ids = [report.nodeid for category in FAILED for report in reporter.stats.get(category, ())]
    path.write_text("".join(f"{each}\n" for each in dict.fromkeys(ids)))
