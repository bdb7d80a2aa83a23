"""measure_stages: measures the throughput of a pipeline under a steady load, and how busy its stages are.

Since other processes may use the cores too, three shares of the time are reported for each stage: it computes, it waits
for a core, or it is idle, because it waits for a plan or for another stage."""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path
from typing import Any

from emberline.bench.processes import read_thread_seconds
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


def measure_stages(report: BenchReport, model_name: str, stages: int, seconds: float) -> None:
    """Measure one rank with `stages` threads, then pipelines of `stages` stages with one thread each.

    The stages of one pipeline have about equal numbers of weights, those of the other about equal measured times. A
    request that ends is replaced by a new one, so that prompts are computed all the time."""
    model = str(resolve_model(model_name))
    config = ModelConfig.from_checkpoint(Checkpoint.open(Path(model)))
    by_weights = ",".join(str(len(Stage.from_config(config, index, stages).layers)) for index in range(stages))
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
    pids = _find_rank_pids(loaded.engine)
    before, began, tokens = [read_thread_seconds(pid) for pid in pids], time.perf_counter(), load.num_tokens
    load.run(seconds)
    wall = time.perf_counter() - began
    report.add(f"{name}_tokens_per_s", (load.num_tokens - tokens) / wall, "tok/s")
    if loaded.ranks:
        report.config["stages"][name] = [each.layers for each in loaded.ranks]
        for rank, pid in enumerate(pids):
            ran, waited = (now - then for now, then in zip(read_thread_seconds(pid), before[rank], strict=True))
            report.add(f"{name}_busy_share_stage{rank}", ran / wall, "x")
            report.add(f"{name}_core_wait_share_stage{rank}", waited / wall, "x")
            report.add(f"{name}_idle_share_stage{rank}", 1.0 - (ran + waited) / wall, "x")
            report.add(f"{name}_cost_share_stage{rank}", loaded.ranks[rank].cost_share, "x")


def _find_rank_pids(engine: Engine) -> list[int]:
    """Return the process of each rank, whose main thread computes."""
    if not isinstance(engine.runner, LeaderRunner) or not isinstance(group := engine.runner.ranks, RankGroup):
        return [os.getpid()]
    return [group.pids.get(rank, os.getpid()) for rank in range(len(group.pids) + 1)]


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
