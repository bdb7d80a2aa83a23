"""Compares the simulator with open-loop runs of the engine on an H200, from committed result files.

The runs had no HTTP server: `python -m emberline.bench.gpu open` runs the engine in its own process. Here the same loop
runs a simulated engine, with the same arrivals on a virtual clock. Results of engines that chose the size of prompt
chunks by an older policy cannot be compared, since the simulator uses today's policy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emberline.bench.accuracy_load import LoadResult
from emberline.bench.gpu import openloop
from emberline.core.clock import ManualClock
from emberline.core.engine_config import GPU_SCHEDULER_DEFAULTS, SchedulerConfig
from emberline.engine.engine import Engine
from emberline.sim.costs import find_cost_table
from emberline.sim.runners import make_sim_runner

# Of the open-loop results, those that were measured with today's policy (commit 23b7fffc and later).
FILES = ("h200-open.json", "h200-open-tail-1.5.json")
RATE = 8.0
CLOCK_STEP_S = 1e-6  # a sleep never ends before the time that it was asked for


def compare_with_file(path: Path) -> tuple[LoadResult, LoadResult, int]:
    """Return the latencies measured in a result file, the simulated latencies, and the number of requests."""
    document = json.loads(path.read_text("utf-8"))
    part = document["config"]["parts"]["open"]
    run = simulate_open_loop(part["settings"], part["seconds"])
    simulated = LoadResult.from_times(run.due, run.times)
    values = {name: document["results"][f"open{RATE:g}_{name}_ms"]["value"] / 1e3 for name in LATENCY_NAMES}
    # The file has no throughput. It would say nothing: all requests ended, so it equals the rate of arrivals.
    return LoadResult(**values, output_rate=math.nan), simulated, part[f"open{RATE:g}"]["requests"]


LATENCY_NAMES = ("ttft_p50", "ttft_p90", "itl_p50", "itl_p90")


def simulate_open_loop(settings: Mapping[str, Any], seconds: float) -> openloop.OpenLoopRun:
    """Run the open loop of the GPU benchmark, with its warm-up, on a simulated H200."""
    table = find_cost_table("h200", "llama-8b", "plain")
    config = SchedulerConfig(**{**GPU_SCHEDULER_DEFAULTS, **settings, "max_waiting": 4096})
    clock = ManualClock()
    engine = Engine(config, make_sim_runner(table.kv_tokens // config.block_size, table, clock), clock)

    def run(duration_s: float, seed: int) -> openloop.OpenLoopRun:
        job, due = openloop.make_open_loop_job(RATE, duration_s, seed)
        job = type(job)([[token % engine.runner.vocab_size for token in prompt] for prompt in job.prompts], job.outputs)
        return openloop.run_open_loop(
            engine,
            job,
            due,
            timeout_s=math.inf,
            clock=lambda: clock.time,
            sleep=lambda pause_s: clock.advance(pause_s + CLOCK_STEP_S),
        )

    run(5.0, seed=1)  # as the benchmark's warm-up, from which the engine has learnt the costs of prompts
    return run(seconds, seed=0)
