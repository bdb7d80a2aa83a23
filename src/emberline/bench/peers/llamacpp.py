"""llama.cpp from the xllamacpp wheel as one of the compared engines.

Its server runs in this process, with continuous batching and one slot per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from threading import Thread
from typing import Any

from emberline.bench.job import BenchJob, TokenTimeline
from emberline.bench.peers.child_protocol import TokenTimeRecorder, serve_jobs

SPARE_TOKENS = 16  # tokens of context beyond the job's need
MIN_CONTEXT_TOKENS = 512


class LlamaCpp:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._library: Any = import_module("xllamacpp")
        # The start runs a job, because a server that is dropped before its loop runs would hang.
        self.run(BenchJob([[1]], [1]))
        self.facts: dict[str, Any] = {
            "xllamacpp": self._library.__version__,
            "built_for": self._library.get_system_info().strip(" |\n"),
        }

    def run(self, job: BenchJob) -> TokenTimeline:
        # A new server for each job: no unused slots, and no cache filled by earlier jobs.
        server = self._start_server(len(job.prompts), max(job.max_request_tokens + SPARE_TOKENS, MIN_CONTEXT_TOKENS))
        ticks = TokenTimeRecorder(job)
        threads = [Thread(target=self._run_request, args=(server, job, i, ticks)) for i in range(len(job.prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ticks.timeline()

    def counters(self) -> Mapping[str, float]:
        return {}

    def _start_server(self, slots: int, context_tokens: int) -> Any:
        params = self._library.CommonParams()
        params.model.path = self._settings["model"]
        params.n_parallel = slots
        params.n_ctx = slots * -(-context_tokens // 256) * 256
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._settings["threads"]
        params.cache_prompt = False
        params.cache_ram_mib = 0
        params.verbosity = 1
        return self._library.Server(params)

    def _run_request(self, server: Any, job: BenchJob, request_index: int, recorder: TokenTimeRecorder) -> None:
        def record_chunk(chunk: dict[str, Any]) -> None:
            # Text may wait for the rest of a character, so the token count is used.
            count = chunk.get("timings", {}).get("predicted_n", 0)
            if count > len(recorder.times[request_index]):
                recorder.record_tokens(request_index, count - len(recorder.times[request_index]))

        body = {
            "prompt": job.prompts[request_index],
            "n_predict": job.outputs[request_index],
            "max_tokens": job.outputs[request_index],
            "stream": True,
        }
        more = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False, "timings_per_token": True}
        server.handle_completions(body | more, record_chunk)


if __name__ == "__main__":
    serve_jobs(LlamaCpp)
