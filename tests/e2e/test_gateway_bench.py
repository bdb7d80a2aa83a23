"""`emberline bench gateway` runs to its end and reports its measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from routers import SRC


def test_gateway_bench_reports_all_figures() -> None:
    small = ["--requests", "40", "--clients", "2", "--streams", "2", "--events", "6", "--rounds", "1", "--soak", "500"]
    command = [sys.executable, "-m", "emberline.cli", "bench", "gateway", *small]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    assert done.returncode == 0, done.stderr
    whole = json.loads(done.stdout.splitlines()[-1])
    assert whole["bench"] == "gateway" and whole["config"]["requests"] == 40
    expected = {"cpu_per_request", "cpu_per_event", "added_p50", "added_p99", "rss", "rss_growth", "cache_hit_p50"}
    assert expected <= set(whole["results"])
