"""A real router and autoscaler, which is killed during a burst: no request is lost, and no process stays behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

from emberline.bench.autoscaler_crash import CrashPlan, run_crash


def test_kill_9_of_the_autoscaler_harms_nothing(tmp_path: Path) -> None:
    outcome = asyncio.run(run_crash(CrashPlan(clients=10, burst_s=4.0, tokens=30), tmp_path))
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(tmp_path.glob("*.log")))
    assert outcome.lost == 0 and outcome.answered > 20, logs
    assert outcome.adopted >= 2 and outcome.workers_in_burst >= 3, logs
    assert outcome.workers_at_end == 0 and outcome.left_processes == 0, logs
