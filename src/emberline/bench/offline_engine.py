"""Emberline's engine as one of the compared engines, without an HTTP server or a prefix cache."""

from __future__ import annotations

import math
import time
from typing import Any

from emberline.bench.job import BenchJob, TokenTimeline
from emberline.bench.peers.child_protocol import TokenTimeRecorder, serve_jobs
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError
from emberline.core.params import SamplingParams
from emberline.core.request import Submission


class OfflineEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        began = time.perf_counter()
        from emberline.engine.boot import boot  # imports torch: part of the start

        imported = time.perf_counter()
        loaded = boot(EngineConfig.build(prefix_cache=False, **settings))
        self.engine = loaded.engine
        self.facts: dict[str, Any] = {
            "kernels": loaded.kernels,
            "weight_bytes": loaded.weight_bytes,
            "seconds": {"imports": imported - began, **loaded.seconds},
        }
        self._jobs = 0

    def run(self, job: BenchJob) -> TokenTimeline:
        self._jobs += 1
        index: dict[str, int] = {}
        ticks = TokenTimeRecorder(job)
        for i, (prompt, output) in enumerate(zip(job.prompts, job.outputs, strict=True)):
            name = f"{self._jobs}-{i}"
            index[name] = i
            params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
            self.engine.add(Submission(name, prompt, params, timeout=math.inf))
        while not self.engine.idle:
            for output_event in self.engine.step():
                if output_event.error is not None:
                    raise EmberlineError(output_event.error)
                ticks.record_tokens(index[output_event.id], len(output_event.tokens))
        return ticks.timeline()

    def counters(self) -> dict[str, float]:
        stats = self.engine.stats()
        return {"host": stats.host_seconds, "busy": stats.busy_seconds, "cpu": stats.cpu_seconds, "steps": stats.step}


if __name__ == "__main__":
    serve_jobs(OfflineEngine)
