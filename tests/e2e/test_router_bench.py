"""`emberline bench router` runs to its end and says what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from routers import SRC


def test_router_bench_reports_results() -> None:
    small = ["--requests", "8", "--streams", "2", "--events", "4", "--rounds", "1", "--workers", "2"]
    command = [sys.executable, "-m", "emberline.cli", "bench", "router", *small]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    assert done.returncode == 0, done.stderr
    whole = json.loads(done.stdout.splitlines()[-1])
    assert whole["bench"] == "router" and whole["config"]["requests"] == 8
    assert {"cpu_per_request", "cpu_per_event", "events", "first_byte_p99"} <= set(whole["results"])
