"""measure_stages: how busy the stages of a pipeline are under a steady load, and what the load's throughput is."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

from emberline.bench.report import BenchReport
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.loaded_engine import LoadedEngine
from emberline.engine.ranks.group import RankGroup
from emberline.engine.ranks.leader import LeaderRunner
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.source import resolve_model
from emberline.models.config import ModelConfig
from emberline.models.stage import Stage

RUNNING = 16  # requests at any time
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 192), (48, 144)  # of a request: from, to
WARM_UP_S = 3.0
CPU_CLOCK_OF_PROCESS = 2  # the lowest bits of a clock's number, as in clock_getcpuclockid(3)


def measure_stages(report: BenchReport, model_name: str, stages: int, seconds: float) -> None:
    """Measure one rank with `stages` threads, then stages with one thread each: divided by weights, and by times.

    A request that ends is replaced by another, so that prompts are computed all the time."""
    model = str(resolve_model(model_name))
    config = ModelConfig.from_checkpoint(Checkpoint.open(Path(model)))
    by_weights = ",".join(str(len(Stage.of(config, index, stages).layers)) for index in range(stages))
    report.config["stages"] = {"model": model_name, "running": RUNNING, "seconds": seconds}
    layouts: dict[str, dict[str, Any]] = {
        "one_rank": {"threads": stages},
        f"pp{stages}_by_weights": {"threads": 1, "pp": stages, "pp_layers": by_weights},
        f"pp{stages}_by_time": {"threads": 1, "pp": stages},
    }
    for name, settings in layouts.items():
        loaded = boot(EngineConfig.build(model, device="cpu", prefix_cache=False, **settings))
        try:
            _measure_layout(report, name, loaded, seconds)
        finally:
            loaded.engine.close()


def _measure_layout(report: BenchReport, name: str, loaded: LoadedEngine, seconds: float) -> None:
    load = SteadyLoad(loaded.engine)
    load.run(WARM_UP_S)
    began, cpu, tokens = time.perf_counter(), _read_cpu_seconds(loaded.engine), load.num_tokens
    load.run(seconds)
    wall = time.perf_counter() - began
    report.add(f"{name}_tokens_per_s", (load.num_tokens - tokens) / wall, "tok/s")
    if loaded.ranks:
        report.config["stages"][name] = [each.layers for each in loaded.ranks]
        for rank, used in enumerate(_read_cpu_seconds(loaded.engine)):
            report.add(f"{name}_busy_share_stage{rank}", (used - cpu[rank]) / wall, "x")
            report.add(f"{name}_cost_share_stage{rank}", loaded.ranks[rank].cost_share, "x")


def _read_cpu_seconds(engine: Engine) -> list[float]:
    """Return the CPU time of each rank's process so far."""
    if not isinstance(engine.runner, LeaderRunner) or not isinstance(group := engine.runner.ranks, RankGroup):
        return [time.process_time()]
    pids = group.pids
    clocks = {rank: time.clock_gettime((~pid << 3) | CPU_CLOCK_OF_PROCESS) for rank, pid in pids.items()}
    return [clocks.get(rank, time.process_time()) for rank in range(len(pids) + 1)]


class SteadyLoad:
    """Keeps RUNNING requests open."""

    def __init__(self, engine: Engine) -> None:
        self.num_tokens = 0  # that were sampled
        self._engine, self._random, self._num_requests, self._num_open = engine, random.Random(0), 0, 0

    def run(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            while self._num_open < RUNNING:
                self._add()
            for output in self._engine.step():
                if output.error is not None:
                    raise EmberlineError(output.error)
                self.num_tokens += len(output.tokens)
                self._num_open -= output.finish is not None

    def _add(self) -> None:
        self._num_requests += 1
        self._num_open += 1
        prompt = [self._random.randrange(3, 1000) for _ in range(self._random.randint(*PROMPT_TOKENS))]
        params = SamplingParams(max_tokens=self._random.randint(*OUTPUT_TOKENS), ignore_eos=True)
        self._engine.add(Submission(f"r{self._num_requests}", prompt, params, timeout=math.inf))
