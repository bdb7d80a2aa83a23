"""llama.cpp built for this machine as one of the compared engines, used through llama-cpp-python's bindings.

Its decode function is called directly. As in llama.cpp's parallel example, a batch holds one token of every running
sequence, then prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from emberline.bench.job import BenchJob, TokenTimeline
from emberline.bench.peers.child_protocol import TokenTimeRecorder, serve_jobs

BATCH = 2048  # llama.cpp's default; it divides a call into parts of 512
STEP = 256  # contexts are multiples of this


class LlamaCppNative:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._numpy: Any = import_module("numpy")
        self._library: Any = import_module("llama_cpp")
        self._threads = settings["threads"]
        self._library.llama_backend_init()
        params = self._library.llama_model_default_params()
        self._model = self._library.llama_model_load_from_file(settings["model"].encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load the model {settings['model']}")
        self._vocab = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model))
        self.facts: dict[str, Any] = {
            "llama-cpp-python": self._library.__version__,
            "built_for": self._library.llama_print_system_info().decode().strip(" |\n"),
        }

    def run(self, job: BenchJob) -> TokenTimeline:
        context = self._create_context(len(job.prompts), job.max_request_tokens)
        batch = self._library.llama_batch_init(BATCH, 0, 1)
        known = [list(prompt) for prompt in job.prompts]
        fed = [0] * len(known)
        ticks = TokenTimeRecorder(job)
        while todo := [i for i, output in enumerate(job.outputs) if len(ticks.times[i]) < output]:
            todo.sort(key=lambda i: len(known[i]) - fed[i])  # sequences that need one token first
            sampled = self._fill_batch(batch, todo, known, fed)
            if status := self._library.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode failed with status {status}")
            for i, row in sampled.items():
                known[i].append(self._most_likely_token(context, row))
                ticks.record_tokens(i)
        self._library.llama_batch_free(batch)
        self._library.llama_free(context)
        return ticks.timeline()

    def counters(self) -> Mapping[str, float]:
        return {}

    def _create_context(self, sequences: int, max_tokens: int) -> Any:
        params = self._library.llama_context_default_params()
        params.n_ctx = sequences * -(-max_tokens // STEP) * STEP
        params.n_seq_max = sequences
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = self._threads
        return self._library.llama_init_from_model(self._model, params)

    def _fill_batch(
        self, batch: Any, pending_sequences: list[int], known_tokens: list[list[int]], num_computed: list[int]
    ) -> dict[int, int]:
        """Fill the batch with tokens that are not yet computed.

        Return the batch row of the last token of each sequence whose tokens are then all computed; it can be sampled.
        """
        rows: dict[int, int] = {}
        batch.n_tokens = 0
        for i in pending_sequences:
            end = min(len(known_tokens[i]), num_computed[i] + BATCH - batch.n_tokens)
            for position in range(num_computed[i], end):
                row = batch.n_tokens
                batch.token[row] = known_tokens[i][position]
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = i
                batch.logits[row] = position == len(known_tokens[i]) - 1
                batch.n_tokens += 1
            if num_computed[i] < end == len(known_tokens[i]):
                rows[i] = batch.n_tokens - 1
            num_computed[i] = end
        return rows

    def _most_likely_token(self, context: Any, row: int) -> int:
        logits = self._library.llama_get_logits_ith(context, row)
        return int(self._numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())


if __name__ == "__main__":
    serve_jobs(LlamaCppNative)
