"""Hugging Face transformers in eager mode as one of the compared engines.

It calls `generate` on a batch of equal lengths, without continuous batching.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from emberline.bench.job import BenchJob, TokenTimeline
from emberline.bench.peers.child_protocol import TokenTimeRecorder, serve_jobs


class Transformers:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._torch: Any = import_module("torch")
        self._library: Any = import_module("transformers")
        self._torch.set_num_threads(settings["threads"])
        dtype = getattr(self._torch, settings["dtype"])
        self._model = self._library.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
        self.facts: dict[str, Any] = {
            "transformers": self._library.__version__,
            "torch": self._torch.__version__,
            "dtype": settings["dtype"],
        }

    def run(self, job: BenchJob) -> TokenTimeline:
        if len({len(prompt) for prompt in job.prompts}) > 1 or len(set(job.outputs)) > 1:
            raise NotImplementedError(
                "transformers can only run requests of equal length here, because it would pad the shorter ones"
            )
        ids = self._torch.tensor(job.prompts)
        ticks = TokenTimeRecorder(job)

        def record_step(*_: Any) -> Any:
            for i in range(len(job.prompts)):
                ticks.record_tokens(i)
            return self._torch.zeros(len(job.prompts), dtype=self._torch.bool)

        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=job.outputs[0],
                min_new_tokens=job.outputs[0],
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=self._library.StoppingCriteriaList([record_step]),
            )
        return ticks.timeline()

    def counters(self) -> Mapping[str, float]:
        return {}


if __name__ == "__main__":
    serve_jobs(Transformers)
