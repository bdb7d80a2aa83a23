"""vLLM's offline engine as one of the compared engines.

Its engine steps are run in a loop, in the same way as in vLLM's LLM class.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from emberline.bench.job import BenchJob, TokenTimeline
from emberline.bench.peers.child_protocol import TokenTimeRecorder, serve_jobs


class VLLM:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._vllm: Any = import_module("vllm")
        llm = self._vllm.LLM(enable_prefix_caching=False, disable_log_stats=True, seed=0, **settings)
        self._engine = llm.llm_engine
        self._jobs = 0
        self.facts: dict[str, Any] = {"vllm": self._vllm.__version__}

    def run(self, job: BenchJob) -> TokenTimeline:
        self._jobs += 1
        index: dict[str, int] = {}
        ticks = TokenTimeRecorder(job)
        for i, (prompt, output) in enumerate(zip(job.prompts, job.outputs, strict=True)):
            params = self._vllm.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
            name = f"{self._jobs}-{i}"
            index[name] = i
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output_event in self._engine.step():
                i = index[output_event.request_id]
                ticks.record_tokens(i, len(output_event.outputs[0].token_ids) - len(ticks.times[i]))
        return ticks.timeline()

    def counters(self) -> Mapping[str, float]:
        return {}


if __name__ == "__main__":
    serve_jobs(VLLM)
